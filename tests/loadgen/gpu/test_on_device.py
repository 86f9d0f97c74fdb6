"""`ramet bench gpu` on the simulated GPU: every part computes there, with FlashInfer and graphs where they should be."""

import pytest

from loadgen.gpu import bench_gpu, correctness
from loadgen.gpu.speed import TINY
from tests.runtime.execution.sim.conftest import device  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_gpu, "FULL", TINY)
    monkeypatch.setattr(correctness, "_NEW", 4)


def test_tokens_come_from_flashinfer_and_graphs(device, measured, small_heads):  # noqa: F811
    rows = measured("gpu", "--model", small_heads, "--parts", "tokens", "pairs")
    print(rows)


@pytest.fixture(scope="module")
def small_heads(tmp_path_factory):
    from tests.runtime.execution.sim.engines import save

    return save("llama", tmp_path_factory.mktemp("llama"))


def test_speed(device, measured):  # noqa: F811
    rows = measured("gpu", "--parts", "decode", "--only", "mode=default")
    for row in rows:
        print(row)

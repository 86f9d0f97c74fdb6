"""`ramet bench gpu` on the simulated GPU: what must be FlashInfer's and a graph's is."""

import pytest

from loadgen.experiments.gpu import correctness
from loadgen.experiments.gpu.speed import PREFILLS, use_prefill
from loadgen.experiments.gpu.watched import WatchedDrive
from runtime.execution import building
from tests.runtime.execution.sim.conftest import device
from tests.runtime.execution.sim.engines import draw, save

__all__ = ["device"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save("Llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def ours(device, model, monkeypatch):
    """The tokens of an engine, and how its steps ran."""
    monkeypatch.setattr(correctness, "_NEW", 3)
    sizes = building._graph_sizes
    monkeypatch.setattr(building, "_graph_sizes", lambda *given: [size for size in sizes(*given) if size == 2])
    return lambda: correctness._ours(model, {"device": "cuda", "dtype": "bfloat16"}, [draw(1, 20), draw(2, 30)])


def test_tokens_come_from_flashinfer_and_graphs(ours):
    cold, warm, ran = ours()
    assert cold == warm
    assert ran == {"graphs": 1, "sharing": 0}


def test_torchs_attention_in_place_of_flashinfer_is_an_error(ours, monkeypatch):
    """It would give the right tokens, and figures of another path."""
    monkeypatch.setattr("runtime.execution.flashinfer_package.VERSION", "0")
    with pytest.raises(RuntimeError, match=r"the attention backend is torch, where flashinfer should be: FlashInfer"):
        ours()


@pytest.mark.parametrize(("batches", "share"), [("2", 1), ("0", 0)])
def test_prompts_in_graphs_are_counted(device, model, batches, share):
    drive = WatchedDrive(model, device="cuda", dtype="bfloat16", cuda_graph_batches=batches, pool_tokens=1024)
    for length in (40, 90):
        drive.add(drive.text(length), 2)
        drive.finish()
    assert drive.seen["prompts"] == 2
    assert drive.share("prompt graphs") == share
    drive.forget()
    drive.add(drive.text(300), 1)
    drive.add(drive.text(400), 1)
    drive.first_tokens()
    assert drive.share("prompt graphs") == 0, "700 rows"


@pytest.mark.parametrize("kernels", PREFILLS)
def test_prompts_run_through_the_kernels_that_are_named(device, model, monkeypatch, kernels):
    drive = WatchedDrive(model, device="cuda", dtype="bfloat16", cuda_graph_batches="0", pool_tokens=1024)
    attention, made = drive.core.executor.decoder.forward.keywords["backend"], []
    make = attention._flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def named(workspace, backend, **options):
        made.append(backend)
        return make(workspace, backend="fa2", **options)  # the only one in torch

    monkeypatch.setattr(attention._flashinfer, "BatchPrefillWithPagedKVCacheWrapper", named)
    use_prefill(drive.core.executor, kernels)
    drive.add(drive.text(40), 1)
    assert drive.first_tokens() > 0
    assert set(made) == {kernels}

"""A steady decode step of each family of models does nothing that would hold up a GPU, or exactly what is known."""

import pytest

from tests.runtime.execution.sim.engines import FAMILIES, Engine, draw

STEPS = 4
_MASKS = "runtime/execution/attention/flashinfer.py"
# Stalls of all steps by file, where there are any.
KNOWN = {
    # A window is a mask, which FlashInfer packs.
    "Mistral": {_MASKS: 2 * STEPS},
}


@pytest.fixture(params=FAMILIES)
def path(request, saved):
    return saved(request.param)


@pytest.fixture
def engine(path, device):
    return Engine(device, path)


def test_steady_decode(engine, request):
    engine.begin_decode([draw(i, 30 + i) for i in range(4)])
    events = engine.watch_steps(STEPS)
    kind = request.node.callspec.params["path"]
    assert events.stalls_by_file() == KNOWN.get(kind, {}), events.stalls
    assert engine.core.counters["overlapped_steps"] >= STEPS
    assert events.count("launch") == (STEPS if kind in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe") else 0)
    assert events.count("download") == STEPS, "the tokens, and nothing else"

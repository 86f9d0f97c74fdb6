"""Decode steps of every reuse strategy on the simulated device: no step waits or copies unasked, or as is known."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from tests.runtime.execution.sim.engines import Engine, draw, save
from tests.runtime.execution.sim.events import Events
from tests.runtime.features.chunks.reference import METHODS, UNSCALED

STEPS = 4
_FLASHINFER = "runtime/execution/attention/flashinfer.py"
# Recomputed rows between others are a mask for later rows, which FlashInfer packs.
_MASKED = {_FLASHINFER: 2 * STEPS}


@pytest.fixture
def llama(saved):
    return saved("Llama")


def steady(engine: Engine, prompts: Sequence[list[int]], reuse: dict[str, Any]) -> Events:
    """The events of some decode steps of requests with the same `reuse` fields."""
    for i, prompt in enumerate(prompts):
        engine.send(str(i), prompt, {"max_new_tokens": 40}, reuse=reuse)
        assert str(i) not in engine.finish
    while not all(request.num_output for request in engine.core.requests.values()):
        engine.step()
    for _ in range(3):
        engine.step()
    return engine.watch_steps(STEPS)


@pytest.mark.parametrize("method", METHODS)
def test_documents(llama, device, method):
    engine = Engine(device, llama)
    reuse = {
        "strategy": "chunks",
        "method": method,
        "documents": [[8, 48], [48, 81]],
        "names": ["a", "b"],
        "granularity": "token",
        "chunk_tokens": 32,
    }
    if method not in UNSCALED:
        reuse["ratio"] = 0.3
    if method == "legolink":
        reuse["k"] = 3
    events = steady(engine, [[*draw(1, 8), *draw(2, 40), *draw(3, 33), *draw(i, 7)] for i in range(2)], reuse)
    assert events.stalls_by_file() == ({} if method in UNSCALED else _MASKED), events.stalls


def test_modules(llama, device):
    entries = [
        {"name": f"/{i}", "tokens": array("i", draw(i, 25)).tobytes(), "anchors": [[0, 25 * i]], "holes": []}
        for i in range(2)
    ]
    reuse = {"strategy": "chunks", "modules": entries, "anchors": [[0, 50]]}
    assert steady(Engine(device, llama), [draw(i, 9) for i in range(3)], reuse).stalls == []


def test_reasoncache(tmp_path_factory, default_model_dir, request):
    path = save("Llama", tmp_path_factory.mktemp("tokenizer"), default_model_dir)
    engine = Engine(request.getfixturevalue("device"), path)
    assert steady(engine, [[*draw(7, 30), *draw(i, 9)] for i in range(3)], {"strategy": "reasoncache"}).stalls == []

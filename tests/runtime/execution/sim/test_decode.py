"""Steady decode steps on the simulated device: no step waits or copies unasked."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.engines import Engine, draw, save


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save("Llama", tmp_path_factory.mktemp("llama"))


def test_a_step_in_a_graph_waits_for_a_plan_and_for_tokens(device, llama):
    engine = Engine(device, llama)
    assert engine.core.info.attention_backend == "flashinfer"
    engine.begin_decode([draw(i, 20 + i) for i in range(4)])
    events = engine.watch_steps(5)
    assert events.stalls == []
    assert (events.count("launch"), events.count("wait")) == (5, 10)
    assert engine.core.counters["failed_steps"] == 0


def test_the_device_gives_the_tokens_of_the_host(device, llama, monkeypatch):
    """In float32, where no rounding decides; FlashInfer's own kernels have none."""
    prompts = [draw(i, 20 + i) for i in range(4)]
    with monkeypatch.context() as patched:
        patched.setattr("runtime.execution.building.choose_attention", lambda *_: "flashinfer")
        engine = Engine(device, llama, dtype="float32")
    found = engine.together(prompts, max_new_tokens=8)
    assert engine.core.executor.decoder.graphs._graphs
    assert found == Driver(make_core(llama, kernels="torch")).together(prompts, max_new_tokens=8)

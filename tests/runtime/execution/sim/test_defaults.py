"""What an engine chooses on a GPU."""

import pytest

from tests.runtime.execution.sim.engines import Engine, draw


@pytest.fixture
def llama(saved):
    return saved("Llama")


def test_a_gpu_runs_more_requests(llama, device):
    engine = Engine(device, llama)
    assert engine.core.scheduler.max_running == engine.core.info.max_running == 256
    assert Engine(device, llama, max_running=3).core.info.max_running == 3


def test_another_gpu_than_the_first(llama, device):
    """FlashInfer launches its kernels on the current device."""
    engine = Engine(device, llama, device="cuda:1")
    prompts = [draw(i, 20) for i in range(3)]
    assert all(len(tokens) == 5 for tokens in engine.together(prompts, max_new_tokens=5))
    assert engine.core.counters["failed_requests"] == 0
    assert engine.core.executor.pool.k.device.index == 1

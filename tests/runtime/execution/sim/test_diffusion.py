"""Denoising steps on the simulated device: one transfer to the host for all requests of a step."""

import pytest

from tests.runtime.execution.sim.engines import DIFFUSION, Engine, draw

STEPS = 4


@pytest.fixture(params=DIFFUSION)
def path(request, saved):
    return saved(request.param)


@pytest.fixture
def engine(path, device):
    return Engine(device, path, page_size=4)


def test_denoising(engine):
    fields = [{}, {"temperature": 0.7, "seed": 3}, {"threshold": 0.99}, {}]
    for i, more in enumerate(fields):
        engine.ask(draw(i, 20 + i), 32, logit_bias={7: -1.0}, **more)
    for _ in range(3):
        engine.step()
    events = engine.watch_steps(STEPS)
    # Where a finished block is computed with the next one, it does not see this one: FlashInfer packs a mask.
    known = {"runtime/execution/attention/flashinfer.py": 4} if "sdar" in engine.core.info.name else {}
    assert events.stalls_by_file() == known, events.stalls
    # FlashInfer's plans of the step before, and what the step has chosen.
    assert events.count("wait") == 2 * STEPS

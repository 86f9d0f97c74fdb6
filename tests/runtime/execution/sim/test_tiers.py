"""Pages that go to main memory and come back on the simulated device: no step waits for them."""

import pytest

from tests.runtime.execution.sim.engines import Engine, draw
from tests.runtime.features.tiers.engines import always, evict


@pytest.fixture
def engine(saved, request):
    path = saved("Llama")
    return Engine(request.getfixturevalue("device"), path, host_memory=0.1, kv_dtype="fp8")


def test_transfers_are_pinned_and_in_a_stream_of_their_own(device, engine):
    always(engine.core)
    with device.watch() as events:
        first = engine.together([draw(i, 100) for i in range(3)], max_new_tokens=4)
        evict(engine.core)
        again = engine.together([draw(i, 100) for i in range(3)], max_new_tokens=4)
    assert first == again
    assert engine.core.state()["tier_loads"] == 3
    assert events.of("sync", "pageable") == []
    moved = [event for event in events.of("upload", "download") if event.place.startswith("runtime/kv/")]
    assert {event.kind for event in moved} == {"upload", "download"}
    assert all(event.stream for event in moved)

"""Graphs of steps with prompt rows on the simulated device: which steps have one, and that it waits for nothing."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.engines import Engine, draw, save

BEHIND = [draw(7, 100) + draw(i, 6 + 11 * i) for i in range(4)]
# Requests that come one after the other, by what they are tried for; a step has at most 128 rows.
PROMPTS = {
    "cold, some in chunks": [draw(i, count) for i, count in enumerate((20, 64, 65, 128, 129, 300))],
    "behind a cached prefix": BEHIND,
    "one that is cached as a whole": [BEHIND[0], BEHIND[0]],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in ("Llama", "Mistral")}


def ran_in(engine):
    """Rows of the graphs that the engine's steps ran in from now on; 0: without a graph."""
    graphs, found = engine.core.executor._graphs, []
    run, graph = graphs.run, graphs._graph

    def counted(batch):
        found.append(0)
        return run(batch)

    def named(shape):
        found[-1] = shape.rows.size
        return graph(shape)

    graphs.run, graphs._graph = counted, named
    return found


def test_a_question_behind_a_cached_prefix_is_one_launch(device, models):
    engine = Engine(device, models["Llama"], pool_tokens=2048)
    for question in range(2):  # the second time, all memory is reserved
        engine.together([draw(7, 150) + draw(question, 40)], max_new_tokens=1)
    engine.ask(draw(7, 150) + draw(5, 40), 4)
    ran = ran_in(engine)
    with device.watch() as events:
        engine.step()
    assert ran == [64]
    assert events.stalls == []
    assert events.count("launch") == 1

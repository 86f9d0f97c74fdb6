"""The adapter that ships: answers of its model with and without reuse."""

import pytest

from loadgen.experiments.accuracy.measure import Runner, group_of
from loadgen.experiments.accuracy.tasks import TASKS, Examples
from loadgen.experiments.accuracy.vocabulary import Vocabulary
from runtime.config import ModelConfig
from runtime.models.resolve import resolve_model
from runtime.offline import Engine

NAME = "smollm2-135m-diffusion"
ROOM = 16


@pytest.fixture(scope="module")
def runner(default_model_dir):
    path = resolve_model(ModelConfig(model=NAME))
    with Engine(model=str(path), dtype="float32", page_size=1, pool_tokens=4096) as engine:
        yield Runner(engine, Vocabulary(path).end), Examples(Vocabulary(path), "shipped")


def outcome(runner, task, **fields) -> dict:
    """Of a request of which about half is its list."""
    run, source = runner
    whole = {"gen_length": ROOM, "steps": ROOM, "block_length": ROOM, **fields}
    return run.run(whole, group_of(source, task, 0, ROOM, 0.5, 1))


def test_it_does_its_task_and_reuse_in_all_layers_ruins_that(runner):
    plain, shallow, naive = (
        outcome(runner, "keep", **fields)
        for fields in ({"reuse": False}, {"depth": 5, "refresh_interval": 1}, {"depth": 30})
    )
    assert plain["right"][0] >= 0.9
    assert shallow["right"][0] >= 0.9
    assert naive["exact"] == [0]
    assert naive["right"][0] <= 0.5
    assert naive["rows"] < shallow["rows"] < plain["rows"]


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"keep"}))
def test_its_own_table_says_how_deep(runner, task):
    """Not for `keep`: with R = 4 it slips too often, and a slip moves what follows (loadgen/results/bicache.md)."""
    own = outcome(runner, task)
    assert own["depth"] == 10
    assert own["right"][0] >= 0.9

"""The bench of BiCache on a small random model: its cases, and where they must agree."""

import pytest

from loadgen.experiments.accuracy.bench_bicache import BOTH, DRIFT, MEASURED, NO_CACHE, BiCacheBench
from loadgen.experiments.accuracy.measure import Runner, group_of
from loadgen.experiments.accuracy.tasks import Examples
from loadgen.experiments.accuracy.vocabulary import Vocabulary
from loadgen.experiments.micro.cost_model import modelled_passes
from runtime import Engine
from tests.runtime.features.diffusion.bicache.models import save_tiny

WHOLE = {"gen_length": 16, "steps": 8, "block_length": 16}
SMALL = ["--room", 16, "--steps", 8, "--questions", 2, "--engine", "dtype=float32"]


@pytest.fixture(scope="module")
def model(default_model_dir, tmp_path_factory):
    return save_tiny("llama_diffusion", tmp_path_factory.mktemp("bicache") / "tiny", tokenizer_from=default_model_dir)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model=str(model), dtype="float32", page_size=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def group(model):
    return group_of(Examples(Vocabulary(model), 1), "keep", 0, 16, 0.75, 3)


def test_every_case_is_measured(measured, model):
    found = measured("bicache", "--model", model, *SMALL, "--ratios", 0.75, "--depth", 2, "--depths", 1, repeats=2)
    assert len({one["case"] for one in found}) == 4 + 4 + 1
    assert all(len(one["exact"]) == len(one["right"]) == 2 for one in found)
    assert {one["depth"] for one in found if one["case"] == "d = 1"} == {1}


def test_depths_that_are_measured_in_serving(measured, model):
    found = measured("bicache", "--model", model, *SMALL, "--ratios", 0.75, "--depth", 2, "--measured", "--bound", 1e4)
    assert [one["case"] for one in found] == ["BiCache", MEASURED, DRIFT, BOTH]
    depths = {one["case"]: one["depth"] for one in found}
    assert depths["BiCache"] == depths[DRIFT] == 2
    assert min(depths.values()) >= 1


def test_the_cost_of_a_request(measured, model):
    small = ["--cost", "--prefix", 32, "--prompt", 8, "--depth", 2, "--batch", 2]
    found = {one["case"]: one for one in measured("bicache", "--model", model, *SMALL, *small)}
    assert [one["depth"] for one in found.values()] == [0, 4, 0, 2, 0, 2, 0, 2]
    assert found[NO_CACHE]["rows"] == 8 * (32 + 8 + 16) > max(one["rows"] for one in list(found.values())[1:])
    assert min(min(one["first"], one["second"], one["seconds"]) for one in found.values()) > 0


def test_the_cost_model():
    """r = 0.88, d = 17 of 32 layers, 128 steps, R = 16."""
    costs = [modelled_passes(8, 120, 0.88, depth) for depth in (0, 17 / 32, 1)]
    assert costs == pytest.approx([22.4, 18.66, 15.36], abs=0.01)
    bench = BiCacheBench(steps=128, refresh_interval=16, prefix=880, prompt=56, room=64)
    bench._layers = 32
    found = [128 * bench.modelled(case, depth) for case, depth in ((NO_CACHE, 0), ("BiCache", 17))]
    assert found == pytest.approx([128, 18.66], abs=0.01)


def test_rows_are_what_the_cost_model_says(engine, group):
    runner = Runner(engine, 2)
    prefix, length, layers = len(group[0].prefix), len(group[0].ids), 4
    rest = length - prefix
    cases = {
        "none": {"reuse": False},
        "naive": {"depth": layers, "refresh_interval": 4},
        "within": {"depth": 0, "refresh_interval": 4},
        "bicache": {"depth": 2, "refresh_interval": 4},
    }
    rows = {name: runner.run({**WHOLE, **fields}, group)["rows"] for name, fields in cases.items()}
    assert rows["none"] == pytest.approx(8 * length)
    assert rows["naive"] == pytest.approx(8 * rest)
    assert rows["within"] == pytest.approx(8 * rest + 2 * prefix)
    # The prefix's rows join before layer d, so that layer d + 1 is not reused too.
    assert rows["bicache"] == pytest.approx(8 * rest + 2 * prefix * (layers - 1) / layers)


def test_right_tokens_are_counted_up_to_the_answers_end(engine, group):
    class Knowing(Runner):
        """Says the right answer, but for the last token of one."""

        def _generate(self, example, params):
            tokens = list(example.answer)
            if example is group[1]:
                tokens[example.answer.index(2)] = 7
            return tokens, 0

    found = Knowing(engine, 2).run({**WHOLE, "reuse": False}, group)
    end = group[1].answer.index(2) + 1
    assert found["exact"] == [1, 0, 1]
    assert found["right"] == [1, (end - 1) / end, 1]

"""The table: its cases on a small random model, what a second run takes from the first, and where cases must agree."""

from __future__ import annotations

import argparse
import json
from itertools import count, pairwise

import pytest

from loadgen.accuracy import bench_bicache
from loadgen.accuracy.cases import Case
from loadgen.accuracy.measure import Cell, Runner
from loadgen.accuracy.rules import TaskSamples
from loadgen.accuracy.tasks import Source
from loadgen.accuracy.vocabulary import Vocabulary
from runtime import Engine
from runtime.errors import ModelError
from runtime.reuse.bicache.profile.profiler import paper_depth
from tests.runtime.reuse.bicache.models import save_tiny

ONE = ["--groups", "1", "--questions", "1"]
WHOLE = {"gen_length": 16, "steps": 8, "block_length": 16}


@pytest.fixture(scope="module")
def model(default_model_dir, tmp_path_factory):
    return save_tiny("llama_diffusion", tmp_path_factory.mktemp("bicache") / "tiny", tokenizer_from=default_model_dir)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model=str(model), dtype="float32", page_size=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def group(model):
    return Cell("keep", 16, 0.75).group(Source(Vocabulary(model), 1), 0, 3)


def options(model, out, *more):
    parser = argparse.ArgumentParser()
    bench_bicache.add_arguments(parser)
    small = ["--room", "16", "--steps", "8", "--groups", "2", "--questions", "2", "--ratios", "0.75", "--depth", "2"]
    fixed = ["--model", str(model), "--dtype", "float32", "--out", str(out)]
    return parser.parse_args([*fixed, *small, *more])


def lines(out):
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def test_a_second_run_measures_only_what_is_new(model, tmp_path):
    assert bench_bicache.run(options(model, tmp_path)) == 0
    first = lines(tmp_path)
    assert len(first) == 8 * 2
    table = (tmp_path / "table.md").read_text()
    cases, gains, pooled = table.split("\n\n|")[1:]
    assert cases.count("\n| ") == pooled.count("\n| ") == 1 + 8
    assert gains.count("\n| keep, r = 0.75 | ") == 1
    assert bench_bicache.run(options(model, tmp_path, "--depths", "0", "4", "--intervals", "1", "8")) == 0
    second = lines(tmp_path)
    assert second[: len(first)] == first
    # d = 0 and d = 4 at R = 4 are the table's own cases.
    assert len(second) == len(first) + 2 * 2
    assert (tmp_path / "depth.png").exists()
    assert (tmp_path / "r.png").exists()


def test_what_is_measured_in_serving_has_a_table_of_its_own(model, tmp_path):
    assert bench_bicache.run(options(model, tmp_path, "--measured", "--groups", "1", "--bound", "1e4")) == 0
    tables = [part for part in (tmp_path / "table.md").read_text().split("\n\n") if part.startswith("| ")]
    assert [table.count("\n| ") for table in tables] == 2 * [1 + 7, 1 + 4], "of the task, of all tasks"
    found = {json.dumps(line["of"]["case"]): line["outcome"] for line in lines(tmp_path)}
    assert len(found) == 7
    by_measured = [outcome for case, outcome in found.items() if "depth_bound" in case and "cache" not in case]
    assert [outcome["depth"] for outcome in by_measured] == [2, 2], "the first one tried, deeper than without a table"
    assert all(outcome["cpu_s"] > 0 for outcome in found.values())
    parts = {case: outcome["parts"] for case, outcome in found.items() if outcome["parts"]}
    assert len(parts) == 4, "reuse, without Fast-dLLM's caches"
    for case, ((encoding, *_, measuring), (later, *_)) in parts.items():
        assert encoding > 0 == later, "the first request encodes"
        assert (measuring > 1) == ("depth_bound" in case)
        assert sum(map(sum, parts[case])) == pytest.approx(found[case]["rows"])


def test_an_adapter_of_the_default_model_in_its_place(default_model_dir, model, tmp_path):
    (tmp_path / "own.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelError, match="own"):
        bench_bicache.run(options(model, tmp_path, "--adapter", str(tmp_path / "own.safetensors")))


def test_thresholds_and_rules_come_from_a_profile_of_the_tasks(model, tmp_path):
    more = ["--taus", "0.5", "0.9999", "--rules", "--profile-samples", "3", "--kl-bound", "0.001", *ONE]
    assert bench_bicache.run(options(model, tmp_path, *more)) == 0
    profile = json.loads((tmp_path / "profile.json").read_text())
    raw = profile["raw_similarity"]["75"]
    table = (tmp_path / "table.md").read_text()
    rows = [line[2:-2].split(" | ") for line in table.splitlines() if line.count(" | ") == 5]
    depths = {row[0]: int(row[-1]) for row in rows if row[-1].isdigit()}
    assert depths["tau = 0.5"] == paper_depth(raw, 0.5) > 1
    assert depths["tau = 0.9999"] == paper_depth(raw, 0.9999) == 1
    assert depths["the paper's rule, tau = 0.97"] == paper_depth(raw, 0.97)
    assert depths["calibrated, at most 0.001 nats"] == profile["depths"]["75"] <= profile["depths_cosine"]["75"]
    (measured,) = [name for name in depths if name.startswith("depth measured while serving, at most 0.05 nats")]
    assert depths[measured] >= 1
    assert (tmp_path / "rules.png").stat().st_size > 1000
    assert "keep, by tau: r = " in table
    assert "no cache" not in table, "--rules takes the table's place"
    assert (tmp_path / "tau.png").exists()
    assert not (tmp_path / "profile.json.partial").exists()
    before = [lines(tmp_path), (tmp_path / "profile.json").stat().st_mtime_ns]
    assert bench_bicache.run(options(model, tmp_path, *more)) == 0
    assert [lines(tmp_path), (tmp_path / "profile.json").stat().st_mtime_ns] == before


def test_a_profile_is_of_requests_that_the_benchmark_does_not_ask(model):
    vocabulary = Vocabulary(model)
    samples = TaskSamples(["keep", "lookup"], 16, Source(vocabulary, ("profile", 1)))
    asked = Source(vocabulary, ("bench", 1))
    for number in range(4):
        sample = samples.sample(75, number)
        assert len(sample.prefix) / sample.length >= 0.74
        assert sample.gen_length == 16
        example = Cell(("keep", "lookup")[number % 2], 16, 0.75).group(asked, number, 1)[0]
        assert (sample.prefix, sample.prompt) != (example.prefix, example.suffix)


def test_it_ends_in_time_and_goes_on(model, tmp_path, monkeypatch):
    """With a clock on which every look takes a second: piece by piece it comes to what it comes to at once."""
    more = ["--taus", "0.9", "--profile-samples", "2", *ONE]
    assert bench_bicache.run(options(model, tmp_path / "whole", *more)) == 0
    clock = count()
    monkeypatch.setattr(bench_bicache, "monotonic", lambda: next(clock))
    sizes = []
    while not sizes or sizes[-1] < len(lines(tmp_path / "whole")):
        assert bench_bicache.run(options(model, tmp_path, *more, "--minutes", "0.1")) == 0
        sizes.append(len(lines(tmp_path)) if (tmp_path / "records.jsonl").exists() else 0)
        if sizes[-1] < len(lines(tmp_path / "whole")):
            assert "|" not in (tmp_path / "table.md").read_text(), "no group is whole"
    assert max(b - a for a, b in pairwise([0, *sizes])) <= 6
    found, wanted = (
        {json.dumps(line["of"]): line["outcome"] for line in lines(out)} for out in (tmp_path, tmp_path / "whole")
    )
    assert found.keys() == wanted.keys()
    for name in ("right", "rows", "depth"):
        assert {key: value[name] for key, value in found.items()} == {key: value[name] for key, value in wanted.items()}


def test_rows_are_what_the_cost_model_says(engine, group):
    runner = Runner(engine, 2)
    prefix, length, layers = len(group[0].prefix), len(group[0].ids), 4
    rest = length - prefix
    rows = {
        name: runner.run(Case(name, {**WHOLE, **fields}), group).rows / len(group)
        for name, fields in {
            "none": {"reuse": False},
            "naive": {"depth": layers, "refresh_interval": 4},
            "within": {"depth": 0, "refresh_interval": 4},
            "bicache": {"depth": 2, "refresh_interval": 4},
        }.items()
    }
    assert rows["none"] == pytest.approx(8 * length)
    assert rows["naive"] == pytest.approx(8 * rest)
    assert rows["within"] == pytest.approx(8 * rest + 2 * prefix)
    # The prefix's rows join before layer d, so that layer d + 1 is not reused too.
    assert rows["bicache"] == pytest.approx(8 * rest + 2 * prefix * (layers - 1) / layers)


def test_refreshing_at_every_step_is_no_cache(engine, group):
    runner = Runner(engine, 2)
    outcomes = [
        runner.run(Case("", {**WHOLE, **fields}), group)
        for fields in ({"reuse": False}, {"depth": 0, "refresh_interval": 1})
    ]
    assert (outcomes[0].right, outcomes[0].rows) == (outcomes[1].right, outcomes[1].rows)


def test_right_tokens_are_counted_up_to_the_answers_end(engine, group):
    class Knowing(Runner):
        """Says the right answer, but for the last token of one."""

        def _generate(self, example, params):
            tokens = list(example.answer)
            if example is group[1]:
                tokens[example.answer.index(2)] = 7
            return tokens, {"shallow_depth": 0, "cached_tokens": 0}

    out = Knowing(engine, 2).run(Case("", {**WHOLE, "reuse": False}), group)
    ends = [example.answer.index(2) + 1 for example in group]
    assert (out.answers, out.exact, out.tokens, out.right) == (3, 2, sum(ends), sum(ends) - 1)
    assert out.generated == 3 * 16

"""The bench of shared reasoning steps on a small random model: its texts, ways that must agree, and its tables."""

from __future__ import annotations

import argparse
import json
import random
from array import array
from itertools import islice

import pytest
import torch

from loadgen.accuracy import bench_reasoning
from loadgen.accuracy.chains import WRITTEN, Chain, problems, read_chains
from loadgen.accuracy.reasoning import Kind, Task, Thinker, compare
from loadgen.accuracy.reasoning_report import sections
from runtime.models.tokenizer import Tokenizer

ANY = {"method": "reasoncache", "percentile": 100}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return Tokenizer.load(tiny_dir)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_chains_answer_in_their_words(name, tokenizer):
    drawn = [WRITTEN[name](random.Random(number), 250) for number in range(5)]
    assert drawn == [WRITTEN[name](random.Random(number), 250) for number in range(5)]
    for chain in drawn:
        said = chain.lead.removeprefix("As I found above, the")
        assert f"{said} {chain.answer} dollars." in chain.thought
        assert (" * " in chain.thought) == (name == "worked")
        task = Task.of(chain, tokenizer, 1000)
        assert tokenizer.decode(task.forced) == chain.thought + chain.lead
        assert task.answer == chain.answer
        assert 250 < len(task.forced) < 450
        short = Task.of(chain, tokenizer, 100)
        assert (short.forced, short.answer) == (task.forced[:100], "")


def test_what_texts_are_like(tokenizer):
    count = "one two three four five six seven eight nine ten"
    steps = (count, "We go home.", f"{count} and on", "We go home.")
    text = "".join(f"{step}\n\n" for step in steps) + "It is"
    task = Task.of(Chain("", text), tokenizer, 1000)
    kind = Kind.of([task], tokenizer, 4)
    assert (kind.chains, kind.steps, kind.similar, kind.again) == (1, 4, 2 / 3, 1 / 3)
    formulas = "".join(f"{count} 2x {sign} 5 is so\n\n" for sign in "+-+")
    kind = Kind.of([Task.of(Chain("", formulas), tokenizer, 1000)], tokenizer, 4)
    assert 0 < kind.by_both < kind.by_words < 1, "the second step passes one filter, the third both"


def test_recorded_chains_are_checked(tmp_path):
    path = tmp_path / "chains.jsonl"
    path.write_text(
        '{"question": "a", "thought": "b"}\n{"question": "c", "thought": "d", "lead": "e", "answer": "f"}\n'
    )
    assert read_chains(path) == [Chain("a", "b"), Chain("c", "d", "e", "f")]
    path.write_text('{"question": "a", "thought": "b"}\n{"question": "c"}\n')
    with pytest.raises(ValueError, match=r"chains.jsonl, line 2: .*thought"):
        read_chains(path)


@pytest.fixture(scope="module")
def thinker(tiny_dir):
    thinker = Thinker(tiny_dir, True, dtype="float32", pool_tokens=2048, page_size=4, debug_invariants=True)
    yield thinker
    thinker.close()


def test_ways_that_share_nothing_predict_what_exact_decoding_does(thinker, tokenizer):
    tasks = [Task.of(WRITTEN["alike"](random.Random(number), 100), tokenizer, 1000) for number in range(2)]
    ways = {"exact": None, "again": None, "none": {**ANY, "tau_max": 1, "tau_min": 1}, "all": ANY}
    found = compare(thinker, ways, tasks)
    assert list(found) == list(ways)
    for name, mine in found.items():
        for one, exact, task in zip(mine, found["exact"], tasks, strict=True):
            assert len(one.kl) == len(one.agrees) == len(task.forced)
            assert one.right is not None
            if name == "all":
                assert one.amsr > 0.1
                assert one.kl[0] < 1e-5 < max(one.kl)
            else:
                assert max(one.kl) < 1e-5
                assert all(one.agrees)
                assert (one.nll, one.amsr) == (pytest.approx(exact.nll, abs=1e-4), 0)


def test_pages_that_are_shared_are_counted_by_page_tables(thinker, tokenizer):
    tasks = [Task.of(WRITTEN["alike"](random.Random(number), 100), tokenizer, 1000) for number in range(2)]
    exact, shared = (_served(thinker, tasks, reuse) for reuse in (None, ANY))
    assert (exact.saved, exact.peak, exact.ended, exact.evaluation_s) == (0, 0, [0, 0], 0)
    assert 0 < shared.saved < shared.peak < 1
    assert min(shared.ended) > 0.1
    assert shared.evaluation_s > 0
    assert exact.tokens == shared.tokens == sum(len(task.forced) for task in tasks)
    assert 1 < exact.running <= 2
    assert 0 < exact.step_ms[0] <= exact.step_ms[1]


def _served(thinker, tasks, reuse):
    serving = thinker.serve(tasks, reuse)
    while serving.go_on():
        pass
    return serving.served()


def test_drafts_are_forced_up_to_a_wrong_token(tiny_dir, tokenizer, thinker):
    task = Task.of(WRITTEN["alike"](random.Random(0), 60), tokenizer, 1000)
    drafting = Thinker(tiny_dir, True, dtype="float32", pool_tokens=2048, page_size=4, drafts="auto")
    drafter = drafting.core.drafter

    def propose(requests, room, beside):
        for request in requests:
            drafter._find(request)  # makes the state of its books
        return {one: array("i", [*task.forced[one.num_output :][:2], 5]) for one in requests}

    drafter.propose = propose
    seen: list[dict[int, torch.Tensor]] = [{}, {}]
    for one, logits in zip((thinker, drafting), seen, strict=True):
        one.predict([task], None, lambda _, number, row, logits=logits: logits.update({number: row.clone()}))
    assert drafting.core.counters["accepted_tokens"] > len(task.forced) / 2
    assert list(seen[0]) == list(seen[1]) == list(range(len(task.forced)))
    assert all(torch.allclose(seen[0][number], seen[1][number], atol=2e-3) for number in seen[0])
    drafting.close()


def test_the_model_writes_chains_of_the_wanted_length(thinker, tokenizer):
    asked = list(islice(problems(random.Random(0)), 2))
    chains = thinker.think(asked, 20, 0.8, 1)
    assert [chain.question for chain in chains] == asked
    assert len({chain.thought for chain in chains}) == 2


def test_it_measures_and_writes(tiny_dir, tmp_path):
    parser = argparse.ArgumentParser()
    bench_reasoning.add_arguments(parser)
    texts = tmp_path / "recorded.jsonl"
    chains = [WRITTEN["alike"](random.Random(number), 60) for number in range(2)]
    texts.write_text("".join(json.dumps({"question": one.question, "thought": one.thought}) + "\n" for one in chains))
    sizes = "--threads 1 --page-size 4 --length 40 --warm-up 1 --requests 2 --room 1 --rounds 1 --batch 2"
    small = ["--model", str(tiny_dir), "--dtype", "float32", *sizes.split(), "--percentile", "100"]
    times = ["--ways", "stale", "random", "--pools", "small", "--json", str(tmp_path / "r.json")]
    assert bench_reasoning.run(parser.parse_args([*small, "--texts", "alike", *times])) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found.keys() == {"page_size", "warm", "speed", "settings"}
    for ways in found["speed"].values():
        assert {name: len(rounds) for name, rounds in ways.items()} == dict(exact=1, stale=1, random=1)
        assert [one["saved"] for one in ways["exact"]] == [0]
    quality = ["--no-speed", "--quality", "--chains", "2", "--percentiles", "100", "--merge", str(tmp_path / "r.json")]
    files = {"--json": "q.json", "--markdown": "q.md", "--plot": "q.png"}
    written = [argument for option, name in files.items() for argument in (option, str(tmp_path / name))]
    assert bench_reasoning.run(parser.parse_args([*small, "--texts", str(texts), *quality, *written])) == 0
    both = json.loads((tmp_path / "q.json").read_text())
    assert both["speed"] == found["speed"]
    assert list(both["quality"]) == list(both["texts"]) == ["recorded"]
    assert list(both["quality"]["recorded"]) == ["exact", "stale 100", "moved 100", "random"]
    assert [one["right"] for one in both["quality"]["recorded"]["exact"]] == [None] * 2
    assert len(list(sections(both))) == 3
    assert "published" in (tmp_path / "q.md").read_text()
    assert (tmp_path / "q.png").stat().st_size > 10_000

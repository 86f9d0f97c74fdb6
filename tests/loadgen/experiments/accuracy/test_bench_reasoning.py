"""The bench of shared reasoning steps on a small random model: its texts, and ways that must agree."""

import json
import random

import pytest

from loadgen.experiments.accuracy.chains import WRITTEN, Chain, read_chains
from loadgen.experiments.accuracy.reasoning import Comparison, Task, Thinker
from runtime.asks import ReasoningAsk

ANY = ReasoningAsk(percentile=100)


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


@pytest.fixture(scope="module")
def tasks(tokenizer):
    return [Task.of(WRITTEN["alike"](random.Random(number), 100), tokenizer, 1000) for number in range(2)]


def test_ways_that_share_nothing_predict_the_tokens_of_exact_decoding(thinker, tasks):
    comparison = Comparison(thinker)
    exact = comparison.compare(tasks, None)
    for ask in (None, ReasoningAsk(100, tau_max=1, tau_min=1)):
        found = comparison.compare(tasks, ask)
        assert (found["amsr"], found["agrees"]) == ([0, 0], [1, 1])
        assert max(found["kl"]) < 1e-5
        assert found["nll"] == pytest.approx(exact["nll"], abs=1e-4)
    shared = comparison.compare(tasks, ANY)
    assert min(shared["amsr"]) > 0.1
    assert max(shared["kl"]) > 1e-5
    assert len(shared["right"]) == 2


def test_pages_that_are_shared_are_counted_by_page_tables(thinker, tasks):
    exact, shared = (thinker.serve(tasks, ask) for ask in (None, ANY))
    assert (exact["amsr"], exact["peak"], exact["ended"], exact["evaluation"]) == (0, 0, 0, 0)
    assert 0 < shared["amsr"] < shared["peak"] < 1
    assert shared["ended"] > 0.1
    assert shared["evaluation"] > 0
    assert 1 < exact["running"] <= 2
    assert min(exact["step"]) > 0


def test_throughput_and_predictions_are_measured(measured, tiny_dir, tmp_path):
    texts = tmp_path / "recorded.jsonl"
    chains = [WRITTEN["alike"](random.Random(number), 60) for number in range(4)]
    texts.write_text("".join(json.dumps({"question": one.question, "thought": one.thought}) + "\n" for one in chains))
    small = ["--model", tiny_dir, "--engine", "dtype=float32", "--page-size", 4, "--length", 40, "--fill", 1]
    found = measured("reasoning", *small, "--texts", "alike", "--requests", 2, "--room", 1)
    assert [(one["work"], one["way"]) for one in found] == [
        (f"{pool} pool", way) for pool in ("small", "large") for way in ("exact", "percentile 80")
    ]
    assert found[0]["amsr"] == 0
    found = measured("reasoning", *small, "--quality", "--texts", texts, "--percentiles", 100)
    assert [one["way"] for one in found] == ["exact", "percentile 100"]
    assert all(len(one["kl"]) == 4 for one in found)
    assert found[0]["right"] == [], "recorded chains have no answers"

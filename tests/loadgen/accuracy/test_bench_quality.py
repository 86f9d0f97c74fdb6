"""The quality bench on a small random model: teacher forcing, where ways must agree, and the table."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from loadgen.accuracy import bench_quality
from loadgen.accuracy.bench_quality import FULL, measure, task_rows, ways_of
from loadgen.accuracy.forced import Ask, Asker
from loadgen.accuracy.parts import TASKS, Item
from runtime.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return Tokenizer.load(tiny_dir)


@pytest.fixture(scope="module")
def asker(tiny_dir):
    asker = Asker(tiny_dir, dtype="float32", pool_tokens=4096, chunk_tokens=16, debug_invariants=True)
    yield asker
    asker.close()


def test_forced_answers_have_the_probabilities_of_transformers(asker, tiny_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    prompts, answers = [list(range(50, 90)), [7]], [list(range(300, 340)), [9, 8]]
    found = asker.forced([Ask(prompt) for prompt in prompts], answers)
    for prompt, answer, logprobs in zip(prompts, answers, found, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        torch.testing.assert_close(logprobs, wanted[len(prompt) - 1 : -1], rtol=0, atol=1e-5)


def test_greedy_answers_are_the_most_likely_forced_ones(asker):
    ask = Ask(list(range(60, 100)))
    (said,) = asker.greedy([ask], 6)
    assert len(said) == 6
    (logprobs,) = asker.forced([ask], [said])
    assert logprobs.argmax(-1).tolist() == said


def test_one_module_that_begins_the_prompt_is_full_attention(asker, tokenizer):
    item = Item("", [["Some words that are read, and more of them."]], None, " It is", " the answer of it")
    figures = {}
    measure(asker, tokenizer, [item], figures)
    assert figures.keys() == {FULL, "independent", "nested", "a scaffold of all"}
    for mine in figures.values():
        assert mine["nll"] == pytest.approx(figures[FULL]["nll"], abs=1e-5)
        assert max(mine["kl"][0]) < 1e-6
        assert mine["right"] == figures[FULL]["right"]


def test_ways_ask_for_the_same_tokens(tokenizer):
    """With full attention they stand in order; each way reads them in entries, and computes the question."""
    item = Item("Read.", [[" One.", " Another one."], [" Two."]], "Which?", "It is", " two", ((0, 1),))
    ways = ways_of(item, tokenizer, 512)
    text = tokenizer.decode(ways[FULL].tokens, skip_special_tokens=False)
    assert "system\nRead. One. Two.<|im_end|>" in text
    assert text.endswith("user\nWhich?<|im_end|>\n<|im_start|>assistant\nIt is")
    names = {way: [entry["name"] for entry in ask.reuse["entries"]] for way, ask in ways.items() if ask.reuse}
    assert names == {
        "independent": ["/", "/m0", "/m1"],
        "nested": ["/", "/m0", "/m1"],
        "a scaffold of each pair": ["/m0 + /m1", "/"],
        "a scaffold of all": ["/ + /m0 + /m1"],
    }
    assert len({tuple(ask.tokens) for way, ask in ways.items() if way != FULL}) == 1


def test_it_measures_and_writes(tiny_dir, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    bench_quality.add_arguments(parser)
    files = {"--json": "q.json", "--markdown": "q.md", "--plot": "q.png"}
    written = [argument for option, name in files.items() for argument in (option, str(tmp_path / name))]
    options = ["--model", str(tiny_dir), "--dtype", "float32", "--items", "2", *written]
    assert bench_quality.run(parser.parse_args(options)) == 0
    tasks = json.loads((tmp_path / "q.json").read_text())["tasks"]
    assert tasks.keys() == TASKS.keys()
    for task, figures in tasks.items():
        assert all(len(values) == 2 for mine in figures.values() for values in mine.values())
        whole = max(kl for kls in figures["a scaffold of all"]["kl"] for kl in kls)
        assert (whole < 1e-6) == (task != "persona"), "the gaps of its unions move what follows"
        assert min(min(kls) for kls in figures["independent"]["kl"]) > 1e-6
    lines = (tmp_path / "q.md").read_text().splitlines()
    assert len(lines) == 2 + sum(len(figures) for figures in tasks.values())
    assert "2 questions a task, float32" in capsys.readouterr().out
    assert (tmp_path / "q.png").stat().st_size > 10_000


def test_differences_are_those_of_the_same_question():
    full = {"nll": [1.0, 5.0], "kl": [[0.0], [0.0]], "right": [1.0, 0.0]}
    mine = {"nll": [1.5, 5.5], "kl": [[0.25], [0.25, 0.75]], "right": [0.0, 0.0]}
    first, second = task_rows("needle", {FULL: full, "nested": mine})
    assert first == ["needle", FULL, "3.000", "", "", "", "50.0", ""]
    assert second[:4] == ["needle", "nested", "3.500", "+0.500 [+0.500, +0.500]"]
    assert second[4:] == ["0.3750 [0.2500, 0.5000]", "0.7000", "0.0", "-50.0 [-100.0, +0.0]"]

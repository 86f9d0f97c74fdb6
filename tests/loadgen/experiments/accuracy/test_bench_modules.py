"""The bench of modules on a small random model: teacher forcing, ways that must agree, and cached tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from loadgen.experiments.accuracy.bench_modules import ways_of
from loadgen.experiments.accuracy.parts import TASKS, Item
from loadgen.experiments.accuracy.quality import FULL, Judge
from loadgen.offline.forced import Ask


def test_forced_answers_have_the_probabilities_of_transformers(asker, tiny_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    prompts, answers = [list(range(50, 90)), [7]], [list(range(300, 340)), [9, 8]]
    found = asker.forced([Ask(prompt) for prompt in prompts], answers)
    for prompt, answer, logprobs in zip(prompts, answers, found, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        torch.testing.assert_close(logprobs, wanted[len(prompt) - 1 : -1], rtol=0, atol=1e-5)


def test_one_module_that_begins_the_prompt_is_full_prefill(asker, tokenizer):
    item = Item("", [["Some words that are read, and more of them."]], None, " It is", " the answer of it")
    ways, judge = ways_of(item, tokenizer, 512), Judge(asker, tokenizer)
    assert ways.keys() == {FULL, "independent", "nested", "a scaffold of all"}
    full = judge.judge("it", [item], [ways[FULL]], None)
    for way in ways.keys() - {FULL}:
        mine = judge.judge("it", [item], [ways[FULL]], [ways[way]])
        assert mine["nll"] == pytest.approx(full["nll"], abs=1e-5)
        assert max(mine["kl"]) < 1e-6
        assert mine["right"] == full["right"]


def test_ways_ask_for_the_same_tokens(tokenizer):
    """With full attention they stand in order; each way reads them in entries, and computes the question."""
    item = Item("Read.", [[" One.", " Another one."], [" Two."]], "Which?", "It is", " two", ((0, 1),))
    ways = ways_of(item, tokenizer, 512)
    text = tokenizer.decode(ways[FULL].tokens, skip_special_tokens=False)
    assert "system\nRead. One. Two.<|im_end|>" in text
    assert text.endswith("user\nWhich?<|im_end|>\n<|im_start|>assistant\nIt is")
    names = {way: [entry.name for entry in ask.asked.entries] for way, ask in ways.items() if ask.asked}
    assert names == {
        "independent": ["/", "/m0", "/m1"],
        "nested": ["/", "/m0", "/m1"],
        "a scaffold of each pair": ["/m0 + /m1", "/"],
        "a scaffold of all": ["/ + /m0 + /m1"],
    }
    assert len({tuple(ask.tokens) for way, ask in ways.items() if way != FULL}) == 1


def test_answers_are_compared_on_every_task(measured, tiny_dir):
    model = ["--model", tiny_dir, "--engine", "dtype=float32"]
    found = measured("modules", *model, "--quality", "--tasks", "persona", "cut")
    assert {one["work"] for one in found} == {"persona", "cut"} < TASKS.keys()
    for one in found:
        assert len(one["nll"]) == len(one["right"]) == 8
        if one["way"] == "a scaffold of all":
            assert (max(one["kl"]) < 1e-6) == (one["work"] != "persona"), "the gaps of its unions move what follows"
        elif one["way"] != FULL:
            assert min(one["kl"]) > 1e-6


def test_each_way_finds_its_tokens_in_the_cache(measured, tiny_dir):
    model = ["--model", tiny_dir, "--engine", "dtype=float32"]
    small = ["--lengths", 200, "--modules", 4, "--new", 16, "--arguments", 0, 10, "--steps", 3]
    found = measured("modules", *model, *small, "--together", 3, "--shared", 200, repeats=2)
    cached = {one["way"]: one["cached"] for one in found if "cached" in one}  # the last of each way
    assert cached["full prefill"] == 0
    assert max(one["cached"] for one in found if one["way"] == "prefix caching, the same order") == 200
    assert max(one["cached"] for one in found if one["way"] == "modules, 0 % arguments") == 200, "in any order"
    assert max(one["cached"] for one in found if one["way"] == "modules, 10 % arguments") == 200 - 5 - 5 - 5 - 3
    pages = {one["way"]: one["pages"] for one in found if "pages" in one}
    assert pages["prefix caching"] == 12 + 3 * 2, "a shared prefix once, and two pages of each request"
    assert pages["modules"] == 4 + 4 + 4 + 3 + 3, "each module once"

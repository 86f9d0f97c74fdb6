"""Training on a small random model: it learns, goes on where it was ended, and sees what it should."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from loadgen.accuracy.train_adapter import Trainer, draw_shape, draw_tasks, parse_options
from runtime.models.adapters.merge import MASK_TOKEN_ID


@pytest.fixture
def trainer(tiny_dir, tmp_path):
    def make(name: str, *more: str) -> Trainer:
        fixed = ["--base", str(tiny_dir), "--rank", "4", "--batch-tokens", "256", "--save-minutes", "1e6"]
        return Trainer(parse_options(["--out", str(tmp_path / name), "--device", "cpu", *fixed, *more]))

    return make


def factors(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.learned().items()}


def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(trainer):
    whole = trainer("whole", "--steps", "6")
    whole.run()
    first = trainer("parts", "--steps", "6")
    first.run(until=3)
    second = trainer("parts", "--steps", "6")
    assert second.step == 3
    second.run()
    assert second.step == whole.step == 6
    expected = factors(whole)
    for name, tensor in factors(second).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_a_run_goes_on_from_an_adapter(trainer, tmp_path):
    first = trainer("before", "--steps", "4")
    first.run()
    second = trainer("after", "--steps", "6", "--start", str(tmp_path / "before" / "adapter.safetensors"))
    assert (second.step, second.tokens) == (4, first.tokens)
    expected = factors(first)
    for name, tensor in factors(second).items():
        torch.testing.assert_close(tensor, expected[name].bfloat16().float(), rtol=0, atol=0)
    second.run()
    assert second.step == 6
    assert trainer("after", "--steps", "6", "--start", str(tmp_path / "before" / "adapter.safetensors")).step == 6


def test_it_learns_and_leaves_the_base_alone(trainer, capsys):
    run = trainer("learning", "--steps", "40", "--lr", "1e-2", "--log-every", "10")
    base = {name: tensor.clone() for name, tensor in run.model.named_parameters() if not tensor.requires_grad}
    run.run()
    losses = [float(line.split()[3]) for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.1
    for name, tensor in base.items():
        assert torch.equal(run.model.get_parameter(name), tensor)


def test_the_mask_has_the_learned_embedding_and_others_their_own(trainer):
    model = trainer("embedding").model
    rows = model.embedded(torch.tensor([[MASK_TOKEN_ID, 40]]))[0]
    assert torch.equal(rows[0], model.mask_embedding)
    assert torch.equal(rows[1], model.model.embed_tokens.weight[40])


def test_rows_read_the_prefix_that_they_are_given_and_teach_it(trainer):
    """The result of a step with a prefix of an earlier canvas; its gradient reaches the prefix's own rows."""
    model = trainer("behind").model
    now, before = torch.tensor([[5, 90, 31, 7, 12]]), torch.tensor([[5, 90, 31, 7, MASK_TOKEN_ID]])
    with torch.no_grad():
        fresh = model.hidden(now, model.first_rows(now, 3))
        torch.testing.assert_close(fresh, model.hidden(now)[:, 3:])
        stale = model.hidden(now, model.first_rows(before, 3))
        assert (stale - fresh).abs().max() > 1e-3
    model.hidden(now, model.first_rows(before, 3)).sum().backward()
    # Only the prefix's rows have seen a mask.
    assert model.mask_embedding.grad.abs().max() > 0


def test_earlier_canvases_show_no_more_than_the_present_one(trainer):
    run = trainer("earlier", "--stale", "1")
    seen = []
    run.model.first_rows = lambda tokens, count: seen.append(tokens)
    tokens = torch.randint(30, 900, (4, 20))
    masked = torch.zeros(4, 8, dtype=torch.bool)
    masked[:, 3] = True
    run._earlier(tokens, masked, 6, 0)
    hidden = seen[0][:, -8:] == MASK_TOKEN_ID
    assert hidden[masked].all()
    assert hidden.sum() > masked.sum()
    assert torch.equal(seen[0][:, :-8], tokens[:, :-8])


def test_shapes_grow_and_keep_to_the_mix():
    rng = random.Random(0)
    early = [draw_shape(rng, 0.1, "keep", [300, 500]) for _ in range(200)]
    late = [draw_shape(rng, 0.9, "keep", [300, 500]) for _ in range(200)]
    assert max(shape.room for shape in early) < min(shape.room for shape in late)
    assert {shape.length for shape in early} == {0}
    assert {shape.length for shape in late} == {0, 300, 500}


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_parts_keep_to_the_mix(parts):
    rng, mix = random.Random(0), {"keep": 2.0, "lookup": 1.0, "choice": 0.0, "arithmetic": 1.0}
    drawn = [draw_tasks(rng, mix, parts) for _ in range(1000)]
    share = Counter(task for tasks in drawn for task in tasks)
    assert {len(tasks) for tasks in drawn} == {parts}
    assert set(share) == {"keep", "lookup", "arithmetic"}
    assert share["keep"] / share.total() == pytest.approx(0.5, abs=0.05)
    if parts == 4:
        assert {tuple(sorted(tasks)) for tasks in drawn} == {("arithmetic", "keep", "keep", "lookup")}


def test_the_parts_of_a_step_have_examples_of_their_own(trainer):
    run = trainer("parts", "--parts", "3", "--steps", "1")
    seen = []
    run._mask = lambda answers, rng, mask=run._mask: seen.append(answers) or mask(answers, rng)
    run.run()
    assert len(seen) == 3
    assert len({row for answers in seen for row in map(tuple, answers.tolist())}) == sum(map(len, seen))

"""Modules whose rows are repaired: against the plain reading, full prefill, and modules without repair."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.engine.driver import greedy
from tests.runtime.features.chunks.plain import Module, Prompt, draw_prompt, draw_schema, draw_tokens
from tests.runtime.features.chunks.reference import METHODS, Reference
from tests.runtime.features.chunks.repaired import repaired, without_gaps
from tests.runtime.reuse.contract.subject import NEW, World
from tests.runtime.reuse.contract.subjects import Modules, Prefix, Repaired

REPAIRS = ("a3", "cacheblend", "prophetkv", "legolink")


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_repairs_modules_as_it_repairs_documents(rope_dirs, method, granularity):
    """With placeholders, arguments, gaps, a module within another; several rotary embeddings and pages."""
    draw = random.Random(f"{method} {granularity}")
    fields = {"method": method, "granularity": granularity, "ratio": 0.3}
    for kind, page_size, step_tokens in (("llama", 16, 7), ("llama_llama3", 1, 256), ("llama_yarn", 4, 64)):
        world = World(Repaired(rope_dirs[kind]), page_size=page_size, step_tokens=step_tokens)
        one = repaired(without_gaps(draw), **fields)
        world.one("cold", one, logprobs=0)
        world.ask("warm", one, logprobs=0)
        world.ask("gaps", repaired(draw_prompt(draw, draw_schema(draw, "s")), **fields), logprobs=0)
        world.run()
        world.check()


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 4, 16]), step_tokens=st.sampled_from([7, 64, 512]))
def test_drawn_prompts_are_repaired_as_the_papers_have_it(ids_dir, seed, page_size, step_tokens):
    draw, world = random.Random(seed), World(Repaired(ids_dir), page_size=page_size, step_tokens=step_tokens)
    schema = draw_schema(draw, "s")
    for i in range(3):
        granularity, ratio = draw.choice(["token", "page"]), draw.choice([0.0, 0.15, 0.6, 1.0])
        fields = {"method": draw.choice(METHODS), "granularity": granularity, "ratio": ratio}
        world.ask(f"{i}", repaired(draw_prompt(draw, schema), **fields), logprobs=draw.choice([None, 0]))
        for _ in range(draw.choice([0, 3, 1000])):
            if world.core.busy:
                world.step()
    world.run()
    world.check()


@pytest.mark.parametrize("method", REPAIRS)
def test_all_rows_repaired_is_full_prefill(ids_dir, method):
    """Cold, warm, and behind an ordinary prompt with the same text, of which it reads nothing. It says so."""
    draw, subject = random.Random(1), Repaired(ids_dir)
    one = repaired(without_gaps(draw), method=method, ratio=1.0)
    world = World(subject, page_size=4)
    answer = world.one("plain", [*one.prompt], by=Prefix(ids_dir))
    assert world.one("cold", one) == world.one("warm", one) == answer
    assert world.cached("cold") == 0
    report = world.report("cold")
    assert (report["exact"], report["method"], report["recomputed_rows"]) == (True, method, 60 - 16 - 4)
    world.check()


@pytest.mark.parametrize("method", REPAIRS)
def test_with_positions_left_out_all_rows_are_those_of_the_model_there(ids_dir, method):
    """It is no ordinary prompt, whose positions have no gaps, and it is not called exact."""
    draw = random.Random(2)
    modules = [Module("/a", draw_tokens(draw, 20), [*range(20)]), Module("/b", draw_tokens(draw, 30), [*range(30, 60)])]
    one = repaired(Prompt(modules, draw_tokens(draw, 7), [*range(60, 67)]), method=method, ratio=1.0)
    world = World(Repaired(ids_dir))
    tokens = world.one("a", one)
    positions = torch.tensor([[*one.positions, *range(67, 66 + NEW)]])
    ids = torch.tensor([[*one.prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits = Reference(ids_dir).model(ids, position_ids=positions, logits_to_keep=NEW).logits[0]
    assert tokens == logits.argmax(-1).tolist()
    assert world.report("a")["exact"] is False


def test_a_repair_reads_the_modules_that_prompts_without_one_have_encoded(ids_dir):
    """And leaves them as they are. Without repair an argument sees the modules behind it, with one it does not."""
    draw = random.Random(3)
    prompt = without_gaps(draw)
    world = World(Repaired(ids_dir), page_size=4)
    plain = world.one("none", prompt, by=Modules(ids_dir), logprobs=0)
    pool = world.core.executor.pool
    pages = [page for node in world.tree.nodes() if node.namespace.entry.startswith("module") for page in node.pages]
    slots = [page * 4 + row for page in pages for row in range(4)]
    before = pool.k[:, slots].clone(), pool.v[:, slots].clone()
    for method in METHODS:
        world.one(method, repaired(prompt, method=method, ratio=0.4))
        assert world.cached(method) >= 40
        assert world.report(method)["computed_modules"] == []
    assert torch.equal(pool.k[:, slots], before[0])
    assert torch.equal(pool.v[:, slots], before[1])
    assert world.one("again", prompt, by=Modules(ids_dir), logprobs=0) == plain
    assert world.cached("again") >= 40 + 16 // 4 * 4 - 4, "own rows are found, and not those of a repair"
    assert world.report("again").keys() == world.report("none").keys()
    world.check()


def test_a_repair_says_what_it_did(ids_dir):
    draw = random.Random(4)
    one = repaired(without_gaps(draw), method="a3", ratio=0.5, granularity="page")
    world = World(Repaired(ids_dir), page_size=4)
    world.one("a", one, reuse={"schema": "s"})
    computed = world.requests["a"].row_layers - 3 * (NEW - 1)
    assert world.report("a") == {
        "strategy": "modules",
        "exact": False,
        "exact_modules": True,
        "modules": ["/a", "/a/b"],
        "computed_modules": ["/a", "/a/b"],
        "method": "a3",
        "ratio": 0.5,
        "granularity": "page",
        "chosen_before": False,
        "recomputed_rows": 20,
        "row_layers": computed,
        "reused_tokens": 0,
        "computed_tokens": 60,
    }


@pytest.mark.parametrize("method", ["a3", "prophetkv"])
def test_a_later_turn_takes_the_rows_that_were_chosen(ids_dir, method):
    draw = random.Random(5)
    prompt = without_gaps(draw)
    world = World(Repaired(ids_dir), page_size=4)
    world.one("1", repaired(prompt, method=method, ratio=0.3), 10)
    more = [*prompt.tokens, *world.tokens["1"], *draw_tokens(draw, 5)]
    positions = [*prompt.positions, *range(60, 75)]
    world.one("2", repaired(Prompt(prompt.modules, more, positions), method=method, ratio=0.3), 10)
    moved = [*more[:3], *more[4:]]
    world.one(
        "other", repaired(Prompt(prompt.modules, moved, [*positions[:3], *positions[4:]]), method=method, ratio=0.3)
    )
    assert [world.report(rid)["chosen_before"] for rid in ("1", "2", "other")] == [False, True, False]
    assert world.cached("2") >= 40 + 16
    world.check(None)


def test_one_module_at_the_beginning_is_exact(ids_dir):
    """With and without repair, and as a document; not if it lies further on, or has placeholders."""
    draw = random.Random(6)
    tokens = draw_tokens(draw, 40)

    def ask(start: int, holes: list[int]) -> Prompt:
        return Prompt([Module("/a", tokens[:30], [*range(start, start + 30)], holes)], tokens[30:],
                      [*range(start + 30, start + 40)])  # fmt: skip

    world = World(Modules(ids_dir))
    for rid, start, holes, exact in (("0", 0, [], True), ("on", 5, [], False), ("hole", 0, [3], False)):
        world.one(rid, ask(start, holes))
        world.one(f"pie {rid}", repaired(ask(start, holes), method="pie"), by=Repaired(ids_dir))
        assert [world.report(one)["exact"] for one in (rid, f"pie {rid}")] == [exact, exact]
    assert world.tokens["0"] == world.tokens["pie 0"] == greedy(Reference(ids_dir).model, tokens, NEW)
    world.check()


def test_models_that_transformers_computes_have_modules_without_repair(ids_dir):
    world = World(Repaired(ids_dir), model_impl="transformers")
    prompt = without_gaps(random.Random(7))
    world.one("none", prompt, by=Modules(ids_dir))
    world.ask("a3", repaired(prompt, method="a3"))
    assert world.finish["a3"].refused
    assert "Ramet's own code" in world.finish["a3"].message
    world.check()

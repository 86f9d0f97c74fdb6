"""The life of documents: encoded once, shared, evicted, retracted, pinned; their costs; and what is refused."""

import random
from array import array
from dataclasses import replace

import pytest
import torch
from msgspec import convert

from radix import Namespace
from runtime.calls import AddPin, EraseTenant, FlushCache, GetTree
from runtime.features.chunks.ask import ChunksAsk
from tests.runtime.engine.driver import call
from tests.runtime.features.chunks.asks import LAYERS, asked, build, row_layers, selected
from tests.runtime.features.chunks.plain import draw_tokens
from tests.runtime.features.chunks.reference import DENSE, LOOKING, METHODS, UNSCALED, Ask
from tests.runtime.reuse.contract.subject import NEW, World
from tests.runtime.reuse.contract.subjects import Fusion, Prefix, check_pins
from tests.tiny import VOCAB

# -- what it costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("method", METHODS)
def test_row_layers_are_those_of_the_formula(ids_dir, method, granularity):
    """Cold; with another system prompt; with another question, of which full reuse encodes all but the last row."""
    draw = random.Random(1)
    texts = [draw_tokens(draw, 70), draw_tokens(draw, 50)]
    cold = build(draw, texts, 35, method=method, granularity=granularity)
    system = replace(cold, prompt=(*draw_tokens(draw, 35), *cold.prompt[35:]))
    question = replace(cold, prompt=(*cold.prompt[:-9], *draw_tokens(draw, 9)))
    world = World(Fusion(ids_dir), page_size=16)
    asked = 8 if method == "full" else 0
    for rid, ask, encoded in (
        ("cold", cold, 32 + 120 + asked),
        ("system", system, 32),
        ("question", question, asked),
    ):
        before = world.row_layers
        world.one(rid, ask, 4)
        rows = selected(world, rid)
        # What stands before the question is the same where the choice does not depend on that.
        again = 3 + len(rows) if rid == "question" and rows and method not in LOOKING else 0
        assert world.row_layers - before == row_layers(ask, rows, encoded, 16, count=4) - LAYERS * again, rid
        assert world.requests[rid].row_layers == world.row_layers - before
        read = 32 + 120 + asked - encoded + (3 if again else 0)
        assert world.cached(rid) == read, rid
    world.check(4)


def test_short_documents_and_last_chunks_are_rows_of_the_prompt(ids_dir):
    """They are computed in full, and never cached alone; the report counts them as computed."""
    draw = random.Random(11)
    one = build(draw, [draw_tokens(draw, 70), draw_tokens(draw, 20)], 16, method="pie", chunk_tokens=32)
    world = World(Fusion(ids_dir), page_size=16)
    fields = {**asked(one), "shortest": 32}
    ask = convert(fields, ChunksAsk)
    runs = world.core.strategies.serving(ask).runs(array("i", one.prompt), Namespace(), ask)
    assert [len(run.tokens) for run in runs] == [32, 32]


def test_a_method_that_chooses_nothing_says_so(ids_dir):
    draw = random.Random(12)
    world = World(Fusion(ids_dir), page_size=16)
    for granularity, ratio in (("page", 0.15), ("token", 0.15)):
        one = build(draw, [draw_tokens(draw, 64)], 16, method="a3", granularity=granularity, ratio=ratio)
        world.one(granularity, one)
        note = world.report(granularity).get("note")
        assert (note is None) == (world.report(granularity)["recomputed_rows"] > 0) == (granularity == "token"), note


@pytest.mark.parametrize("method", METHODS)
def test_the_report_says_what_was_reused(ids_dir, method):
    draw = random.Random(2)
    texts = [draw_tokens(draw, 64), draw_tokens(draw, 32)]
    one = build(draw, texts, 16, method=method, granularity="page")
    world = World(Fusion(ids_dir), page_size=16)
    half = replace(one, prompt=(*one.prompt[16:80], *one.prompt[-9:]), documents=((0, 64),))
    world.one("half", half)
    world.one("a", one)
    report = world.report("a")
    assert report["strategy"] == "fusion"
    assert report["exact"] is False
    assert report["method"] == method
    assert report["granularity"] == "page"
    assert report["chunk_tokens"] == one.chunk_tokens
    assert report["documents"] == ["document 0", "document 1"]
    assert report["computed_documents"] == ["document 1"]
    assert report["recomputed_rows"] == len(selected(world, "a"))
    assert report["reused_tokens"] == 64 + (8 if method == "full" else 0)
    assert report["reused_tokens"] + report["computed_tokens"] == len(one.prompt)
    assert report["row_layers"] == world.requests["a"].row_layers - LAYERS * (NEW - 1)
    assert (method in UNSCALED) == (report.get("ratio") is None)
    world.one("heads", replace(one, ratio=None))
    assert world.report("heads").get("k") == (one.k if method == "legolink" else None)


@pytest.mark.parametrize("method", ["a3", "full"])
def test_the_report_names_documents_and_nothing_else(ids_dir, method):
    """Whatever their titles are; and all of those that share a chunk that was missing."""
    draw = random.Random(3)
    texts = [draw_tokens(draw, 40), draw_tokens(draw, 30)]
    texts[1][:32] = texts[0][:32]
    world = World(Fusion(ids_dir))
    world.one("a", build(draw, texts, 20, method=method), reuse={"names": ["prefix", "question"]})
    assert world.report("a")["documents"] == ["prefix", "question"]
    assert world.report("a")["computed_documents"] == ["prefix", "question"]
    again = build(draw, texts, 20, method=method)
    world.one("again", again, reuse={"names": ["prefix", "question"]})
    assert world.report("again")["computed_documents"] == []


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_comes_again_costs_its_last_row(ids_dir, method, page_size):
    """Or its last page; and layer 0 again, if that row reads the true KV of layer 1.

    Rows that were recomputed are found twice, and counted once.
    """
    draw = random.Random(25)
    one = build(draw, [draw_tokens(draw, 60), draw_tokens(draw, 41)], 20, 23, method=method)
    world = World(Fusion(ids_dir), page_size=page_size)
    for i in range(3):
        before = world.row_layers
        world.one(f"{i}", one, logprobs=0)
        report, cached = world.report(f"{i}"), world.cached(f"{i}")
        assert report["reused_tokens"] == cached
        assert report["computed_tokens"] == len(one.prompt) - cached
        if i:
            assert len(one.prompt) - page_size <= cached < len(one.prompt)
            dense = len(one.prompt) - 20 // page_size * page_size if one.is_dense else 0
            assert 0 <= world.row_layers - before - dense <= LAYERS * (page_size + NEW - 1)
    world.check()


# -- computed once -----------------------------------------------------------------------------------------------


def test_a_document_is_in_memory_once_for_all_who_read_it(ids_dir):
    """At any place; and of the rows that fusion needs meanwhile, only the chosen ones stay."""
    draw = random.Random(5)
    text = draw_tokens(draw, 128)
    world = World(Fusion(ids_dir), page_size=16, max_running=16)
    for i in range(16):
        method = ["a3", "pie", "cacheblend", "legolink", "prophetkv"][i % 5]
        ask = build(draw, [text], i, 5, method=method, k=16, granularity="page")
        world.ask(f"{i}", ask, 64)
    while world.core.busy and not all(world.tokens[f"{i}"] for i in range(16)):
        world.step()
    running = world.core.scheduler.running
    assert len(running) == 16
    tree = world.core.cache.tree
    documents = {n for n in tree.nodes() if n.namespace.entry.startswith("document")}
    assert sum(len(node.pages) for node in documents) == 128 // 16
    held = sum(len(request.sequence.pages) for request in running)
    state = world.core.state()
    most = sum(-(-(i + 5 + len(selected(world, f"{i}")) + 64) // 16) + 1 for i in range(16))
    assert state["pages_private"] <= max(held, most), "dense rows are gone"
    world.run()


def test_chunks_are_shared_by_documents_that_begin_alike(ids_dir):
    draw = random.Random(6)
    start, ends = draw_tokens(draw, 64), [draw_tokens(draw, 20), draw_tokens(draw, 20)]
    world = World(Fusion(ids_dir), page_size=16)
    for i, end in enumerate(ends):
        world.one(f"{i}", build(draw, [start + end], 3, method="pie"))
    world.check()
    assert [world.cached(f"{i}") for i in range(2)] == [0, 64]
    shown = [node.meta for node in call(world.core, GetTree()).nodes if node.meta]
    assert sorted((meta["document"], meta["document_tokens"]) for meta in shown) == [
        ("document 0", length) for length in (20, 20, 32, 32)
    ]


def test_a_document_twice_in_a_prompt(ids_dir):
    draw = random.Random(7)
    text = draw_tokens(draw, 40)
    world = World(Fusion(ids_dir), page_size=16)
    for method in METHODS:
        world.ask(method, build(draw, [text, draw_tokens(draw, 8), text], 5, method=method))
    world.run()
    world.check()


# -- beside exact requests ---------------------------------------------------------------------------------------


def test_a_system_prompt_is_an_exact_prefix(ids_dir):
    """Computed by an ordinary request, read by fused ones; a part of a page is not."""
    draw = random.Random(9)
    one = build(draw, [draw_tokens(draw, 40)], 42, method="cacheblend")
    world = World(Fusion(ids_dir), page_size=16)
    world.one("plain", one.prompt[:45], by=Prefix(ids_dir))
    world.one("fused", one)
    world.check()
    assert world.cached("fused") == 32


# -- later -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_later_turn_finds_the_documents(ids_dir, method):
    """The rows that were chosen first serve it, and so does what was computed of the first turn."""
    draw = random.Random(13)
    first = build(draw, [draw_tokens(draw, 64), draw_tokens(draw, 40)], 16, 20, method=method)
    world = World(Fusion(ids_dir), page_size=16)
    world.one("1", first, 20)
    more = (*first.prompt, *world.tokens["1"], *draw_tokens(draw, 8))
    second = replace(first, prompt=more)
    world.one("2", second, 20)
    world.one("3", replace(first, prompt=(*more, *world.tokens["2"], 77)), 20)
    world.check(20)
    looks = method in ("a3", "cacheblend", "prophetkv", "passages")
    assert [world.report(rid)["chosen_before"] for rid in "123"] == [False, looks, looks]
    world.one("stranger", second, 1, namespace=Namespace("another tenant"))
    assert not world.report("stranger")["chosen_before"]
    assert world.cached("2") >= 104 + 16 + (0 if method == "full" else 16)


@pytest.mark.parametrize("method", METHODS)
def test_own_rows_behind_other_documents_are_other_rows(ids_dir, method):
    """The same question behind documents as long, in another order, further on, and cut otherwise."""
    draw = random.Random(34)
    page, question, one, other = (draw_tokens(draw, n) for n in (16, 40, 48, 48))
    world = World(Fusion(ids_dir), page_size=16)
    for start, texts in ((16, [one, other]), (16, [other, one]), (16, [one, one]), (32, [one, other])):
        prompt = (*page * (start // 16), *texts[0], *texts[1], *question)
        ask = Ask(prompt, ((start, start + 48), (start + 48, start + 96)), method, 0.0, chunk_tokens=48)
        asks = [ask, replace(ask, chunk_tokens=32), replace(ask, ratio=0.3), replace(ask, ratio=0.31)]
        for again in asks:
            world.one(f"{len(world.asked)}", again, logprobs=0)
    world.check()


def test_rows_with_equal_tokens_are_told_apart(ids_dir):
    """A document that repeats one token: other rows of it, recomputed, are other rows."""
    draw = random.Random(35)
    text, other = [77] * 40, [78] * 24
    world = World(Fusion(ids_dir), page_size=1)
    asks = [build(draw, [text, other], 4, 6, ratio=ratio) for ratio in (0.2, 0.4)]
    for one in asks:
        for method in METHODS:
            world.one(f"{len(world.asked)}", replace(one, prompt=asks[0].prompt, method=method), logprobs=0)
    world.check()


@pytest.mark.parametrize("method", METHODS)
def test_turns_that_come_in_another_order(ids_dir, method):
    """The longest first: its rows are not those of a shorter prompt's answer, even if the same were chosen."""
    draw = random.Random(27)
    whole = build(draw, [draw_tokens(draw, 40), draw_tokens(draw, 40)], 5, 60, method=method)
    world = World(Fusion(ids_dir), page_size=4)
    for length in (125, 101, 113, 145, 125):
        world.one(f"{len(world.asked)}", replace(whole, prompt=whole.prompt[:length]), logprobs=0)
    world.check()
    chosen_for = [request.lease.selected_for for request in world.requests.values()]
    looks = method in ("a3", "cacheblend", "prophetkv", "passages")
    assert chosen_for == ([125, 101, 101, 125, 125] if looks else [125, 101, 113, 145, 125])


@pytest.mark.parametrize("method", DENSE)
def test_the_row_behind_the_fused_ones_is_not_computed_ahead(ids_dir, method):
    """It reads the stored KV of layer 1; the last of 31 rows is a step of one row, as decoding is."""
    draw = random.Random(36)
    world = World(Fusion(ids_dir), overlap="on", step_tokens=6)
    world.one("a", build(draw, [draw_tokens(draw, 40), draw_tokens(draw, 24)], 5, 7, method=method), logprobs=0)
    world.check()


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_ends_with_a_document(ids_dir, method):
    """Its last row is computed, and asks; behind more text it is a row of the document."""
    draw = random.Random(31)
    one = build(draw, [draw_tokens(draw, 40), draw_tokens(draw, 31)], 5, 0, method=method)
    world = World(Fusion(ids_dir), page_size=1)
    for i in range(2):
        world.one(f"{i}", one, logprobs=0)
    world.ask("later", replace(one, prompt=(*one.prompt, *world.tokens["0"], 77)), logprobs=0)
    world.ask("again", replace(one, prompt=(*one.prompt, one.prompt[-1], *world.tokens["0"])), logprobs=0)
    world.ask("alone", Ask((9,), ((0, 1),), method, one.ratio), logprobs=0)
    world.run()
    world.check()


def test_choices_are_forgotten_when_they_have_too_many_rows(ids_dir, monkeypatch):
    """The oldest conversation first; its rows are chosen anew, and are the same."""
    monkeypatch.setattr("runtime.features.chunks.choices.MOST_ROWS", 60)
    draw, world = random.Random(41), World(Fusion(ids_dir), page_size=16)
    choices = world.core.strategies["chunks"].choices
    asks = [build(draw, [draw_tokens(draw, 80)], 16, 9, method="a3", ratio=0.3) for _ in range(4)]
    for i, ask in enumerate([*asks, asks[0], asks[3]]):
        world.one(f"{i}", ask)
        assert 0 < sum(len(chosen) + 1 for turns in choices._known.values() for _, _, chosen in turns) <= 60
    assert selected(world, "4") == selected(world, "0")
    world.check()


@pytest.mark.parametrize(
    ("store", "asked", "is_known"),
    [(True, None, True), (False, None, False), (True, FlushCache(), False), (True, EraseTenant(""), False)],
)
def test_choices_are_kept_no_longer_than_the_kv(ids_dir, store, asked, is_known):
    draw, world = random.Random(42), World(Fusion(ids_dir), page_size=16)
    first = build(draw, [draw_tokens(draw, 64)], 16, 9, method="prophetkv")
    world.one("1", first, store=store)
    if asked is not None:
        call(world.core, asked)
    world.one("2", replace(first, prompt=(*first.prompt, 7, 8, 9)))
    assert world.report("2")["chosen_before"] == is_known
    world.check()


@pytest.mark.parametrize("method", ["cacheblend", "prophetkv"])
def test_rows_that_bad_numbers_chose_are_forgotten(ids_dir, method):
    draw, world = random.Random(43), World(Fusion(ids_dir), page_size=16)
    one = build(draw, [draw_tokens(draw, 96)], 0, 9, method=method, granularity="token")
    world.one("encoded", replace(one, method="pie", ratio=None))
    for node in world.tree.nodes():
        for page in node.pages:
            world.core.executor.pool.v[:, page * 16] = torch.nan
    world.one("bad", one)
    assert "finite" in world.finish["bad"].message
    del world.asked["bad"]
    world.one("again", one)
    assert not world.report("again")["reused_tokens"]
    world.check()


# -- pins --------------------------------------------------------------------------------------------------------


def test_documents_are_encoded_ahead_and_pinned(ids_dir):
    draw = random.Random(22)
    text = draw_tokens(draw, 80)
    world = World(Fusion(ids_dir), pool_tokens=640, pin_budget=0.5, page_size=16)
    ask = ChunksAsk("pie", [(0, 80)], ["a"], granularity="page", chunk_tokens=32)
    pins = call(world.core, AddPin(array("i", text).tobytes(), ask=ask, ttl_s=60))
    assert sorted(one.tokens for one in pins) == [16, 32, 32], "one for each chunk"
    assert world.row_layers <= LAYERS * (80 + 1)
    check_pins(world, pins, build(draw, [text], 7), 80)


# -- refusals ----------------------------------------------------------------------------------------------------


def test_refusals_beside_the_fields(ids_dir):
    draw = random.Random(24)
    world = World(Fusion(ids_dir), pool_tokens=160)
    one = build(draw, [draw_tokens(draw, 8)])
    world.ask("logprobs", one, prompt_logprobs_from=0)
    world.ask("pages", build(draw, [draw_tokens(draw, 120)]), 100)
    world.ask("token", replace(one, prompt=(*one.prompt[:-1], VOCAB)))
    world.ask("context", build(draw, [draw_tokens(draw, 600)]))
    for rid in ("logprobs", "pages", "token", "context"):
        assert world.finish[rid].refused, rid
    assert {world.finish[rid].code for rid in ("pages", "context")} == {"context_length_exceeded"}
    assert not world.core.requests
    world.one("no bound", build(draw, [draw_tokens(draw, 30)]), sampling={"max_new_tokens": None})
    assert world.finish["no bound"].type == "length"
    assert len(world.tokens["no bound"]) > 50

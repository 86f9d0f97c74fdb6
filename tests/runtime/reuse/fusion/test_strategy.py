"""The life of documents: encoded once, shared, evicted, retracted, pinned; their costs; and what is refused."""

import random
from array import array
from dataclasses import replace

import pytest

from radix import Namespace
from runtime.calls import AddPin, GetPins, GetTree, RemovePin
from tests.runtime.engine.driver import call
from tests.runtime.reuse.fusion.driver import LAYERS, NEW, FusionDriver, build, check, row_layers
from tests.runtime.reuse.fusion.reference import DENSE, LOOKING, METHODS, Ask
from tests.runtime.reuse.modules.plain import draw_tokens
from tests.tiny import VOCAB

# -- what it costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("method", METHODS)
def test_row_layers_are_those_of_the_formula(tiny_dir, reference, method, granularity):
    """Cold; with another system prompt; with another question, of which full reuse encodes all but the last row."""
    draw = random.Random(1)
    texts = [draw_tokens(draw, 70), draw_tokens(draw, 50)]
    cold = build(draw, texts, 35, method=method, granularity=granularity)
    system = replace(cold, prompt=(*draw_tokens(draw, 35), *cold.prompt[35:]))
    question = replace(cold, prompt=(*cold.prompt[:-9], *draw_tokens(draw, 9)))
    driver = FusionDriver(tiny_dir, page_size=16)
    asked = 8 if method == "full" else 0
    for rid, ask, encoded in (
        ("cold", cold, 32 + 120 + asked),
        ("system", system, 32),
        ("question", question, asked),
    ):
        before = driver.row_layers
        driver.fuse(rid, ask)
        driver.run()
        rows = driver.selected(rid)
        # What stands before the question is the same where the choice does not depend on that.
        again = 3 + len(rows) if rid == "question" and rows and method not in LOOKING else 0
        assert driver.row_layers - before == row_layers(ask, rows, encoded, 16) - LAYERS * again, rid
        assert driver.requests[rid].row_layers == driver.row_layers - before
        read = 32 + 120 + asked - encoded + (3 if again else 0)
        assert driver.cached(rid) == read, rid
    check(driver, reference)


@pytest.mark.parametrize("method", METHODS)
def test_the_report_says_what_was_reused(tiny_dir, method):
    draw = random.Random(2)
    texts = [draw_tokens(draw, 64), draw_tokens(draw, 32)]
    one = build(draw, texts, 16, method=method, granularity="page")
    driver = FusionDriver(tiny_dir, page_size=16)
    half = replace(one, prompt=(*one.prompt[16:80], *one.prompt[-9:]), documents=((0, 64),))
    driver.fuse("half", half)
    driver.run()
    driver.fuse("a", one)
    driver.run()
    report = driver.report("a")
    assert report["strategy"] == "fusion"
    assert report["exact"] is False
    assert report["method"] == method
    assert report["granularity"] == "page"
    assert report["chunk_tokens"] == one.chunk_tokens
    assert report["documents"] == ["document 0", "document 1"]
    assert report["computed_documents"] == ["document 1"]
    assert report["recomputed_rows"] == len(driver.selected("a"))
    assert report["reused_tokens"] == 64 + (8 if method == "full" else 0)
    assert report["reused_tokens"] + report["computed_tokens"] == len(one.prompt)
    assert report["row_layers"] == driver.requests["a"].row_layers - LAYERS * (NEW - 1)
    assert (method in ("pie", "full")) == (report.get("ratio") is None)
    driver.fuse("heads", replace(one, ratio=None))
    driver.run()
    assert driver.report("heads").get("k") == (one.k if method == "legolink" else None)


@pytest.mark.parametrize("method", ["a3", "full"])
def test_the_report_names_documents_and_nothing_else(tiny_dir, method):
    """Whatever their titles are; and all of those that share a chunk that was missing."""
    draw = random.Random(3)
    texts = [draw_tokens(draw, 40), draw_tokens(draw, 30)]
    texts[1][:32] = texts[0][:32]
    driver = FusionDriver(tiny_dir)
    driver.fuse("a", build(draw, texts, 20, method=method), asked={"names": ["prefix", "question"]})
    driver.run()
    assert driver.report("a")["documents"] == ["prefix", "question"]
    assert driver.report("a")["computed_documents"] == ["prefix", "question"]
    again = build(draw, texts, 20, method=method)
    driver.fuse("again", again, asked={"names": ["prefix", "question"]})
    driver.run()
    assert driver.report("again")["computed_documents"] == []


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_comes_again_costs_its_last_row(tiny_dir, reference, method, page_size):
    """Or its last page; and layer 0 again, if that row reads the true KV of layer 1.

    Rows that were recomputed are found twice, and counted once.
    """
    draw = random.Random(25)
    one = build(draw, [draw_tokens(draw, 60), draw_tokens(draw, 41)], 20, 23, method=method)
    driver = FusionDriver(tiny_dir, page_size=page_size)
    for i in range(3):
        before = driver.row_layers
        driver.fuse(f"{i}", one, logprobs=0)
        driver.run()
        report, cached = driver.report(f"{i}"), driver.cached(f"{i}")
        assert report["reused_tokens"] == cached
        assert report["computed_tokens"] == len(one.prompt) - cached
        if i:
            assert len(one.prompt) - page_size <= cached < len(one.prompt)
            dense = len(one.prompt) - 20 // page_size * page_size if one.is_dense else 0
            assert 0 <= driver.row_layers - before - dense <= LAYERS * (page_size + NEW - 1)
    check(driver, reference)


# -- computed once -----------------------------------------------------------------------------------------------


def test_a_document_is_in_memory_once_for_all_who_read_it(tiny_dir):
    """At any place; and of the rows that fusion needs meanwhile, only the chosen ones stay."""
    draw = random.Random(5)
    text = draw_tokens(draw, 128)
    driver = FusionDriver(tiny_dir, page_size=16, max_running=16)
    for i in range(16):
        method = ["a3", "pie", "cacheblend", "legolink", "prophetkv"][i % 5]
        ask = build(draw, [text], i, 5, method=method, k=16, granularity="page")
        driver.fuse(f"{i}", ask, 64)
    while driver.core.busy and not all(driver.tokens[f"{i}"] for i in range(16)):
        driver.step()
    running = driver.core.scheduler.running
    assert len(running) == 16
    tree = driver.core.cache.tree
    documents = {n for n in tree.nodes() if n.namespace.entry.startswith("document")}
    assert sum(len(node.pages) for node in documents) == 128 // 16
    held = sum(len(request.sequence.pages) for request in running)
    state = driver.core.state()
    most = sum(-(-(i + 5 + len(driver.selected(f"{i}")) + 64) // 16) + 1 for i in range(16))
    assert state["pages_private"] <= max(held, most), "dense rows are gone"
    driver.run()


def test_chunks_are_shared_by_documents_that_begin_alike(tiny_dir, reference):
    draw = random.Random(6)
    start, ends = draw_tokens(draw, 64), [draw_tokens(draw, 20), draw_tokens(draw, 20)]
    driver = FusionDriver(tiny_dir, page_size=16)
    for i, end in enumerate(ends):
        driver.fuse(f"{i}", build(draw, [start + end], 3, method="pie"))
        driver.run()
    check(driver, reference)
    assert [driver.cached(f"{i}") for i in range(2)] == [0, 64]
    shown = [node["meta"] for node in call(driver.core, GetTree())["nodes"] if node["meta"]]
    assert sorted((meta["document"], meta["document_tokens"]) for meta in shown) == [
        ("document 0", length) for length in (20, 20, 32, 32)
    ]


def test_a_document_twice_in_a_prompt(tiny_dir, reference):
    draw = random.Random(7)
    text = draw_tokens(draw, 40)
    driver = FusionDriver(tiny_dir, page_size=16)
    for method in METHODS:
        driver.fuse(method, build(draw, [text, draw_tokens(draw, 8), text], 5, method=method))
    driver.run()
    check(driver, reference)


# -- beside exact requests ---------------------------------------------------------------------------------------


def test_a_system_prompt_is_an_exact_prefix(tiny_dir, reference):
    """Computed by an ordinary request, read by fused ones; a part of a page is not."""
    draw = random.Random(9)
    one = build(draw, [draw_tokens(draw, 40)], 42, method="cacheblend")
    driver = FusionDriver(tiny_dir, page_size=16)
    driver.add("plain", one.prompt[:45], max_new_tokens=NEW)
    driver.run()
    driver.fuse("fused", one)
    driver.run()
    check(driver, reference)
    assert driver.cached("fused") == 32


# -- later -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_later_turn_finds_the_documents(tiny_dir, reference, method):
    """The rows that were chosen first serve it, and so does what was computed of the first turn."""
    draw = random.Random(13)
    first = build(draw, [draw_tokens(draw, 64), draw_tokens(draw, 40)], 16, 20, method=method)
    driver = FusionDriver(tiny_dir, page_size=16)
    driver.fuse("1", first, 20)
    driver.run()
    more = (*first.prompt, *driver.tokens["1"], *draw_tokens(draw, 8))
    second = replace(first, prompt=more)
    driver.fuse("2", second, 20)
    driver.run()
    driver.fuse("3", replace(first, prompt=(*more, *driver.tokens["2"], 77)), 20)
    driver.run()
    check(driver, reference, 20)
    looks = method in ("a3", "cacheblend", "prophetkv")
    assert [driver.report(rid)["chosen_before"] for rid in "123"] == [False, looks, looks]
    driver.fuse("stranger", second, 1, namespace=Namespace("another tenant"))
    driver.run()
    assert not driver.report("stranger")["chosen_before"]
    assert driver.cached("2") >= 104 + 16 + (0 if method == "full" else 16)


@pytest.mark.parametrize("method", METHODS)
def test_own_rows_behind_other_documents_are_other_rows(tiny_dir, reference, method):
    """The same question behind documents as long, in another order, further on, and cut otherwise."""
    draw = random.Random(34)
    page, question, one, other = (draw_tokens(draw, n) for n in (16, 40, 48, 48))
    driver = FusionDriver(tiny_dir, page_size=16)
    for start, texts in ((16, [one, other]), (16, [other, one]), (16, [one, one]), (32, [one, other])):
        prompt = (*page * (start // 16), *texts[0], *texts[1], *question)
        ask = Ask(prompt, ((start, start + 48), (start + 48, start + 96)), method, 0.0, chunk_tokens=48)
        asks = [ask, replace(ask, chunk_tokens=32), replace(ask, ratio=0.3), replace(ask, ratio=0.31)]
        for again in asks:
            driver.fuse(f"{len(driver.asks)}", again, logprobs=0)
            driver.run()
    check(driver, reference)


def test_rows_with_equal_tokens_are_told_apart(tiny_dir, reference):
    """A document that repeats one token: other rows of it, recomputed, are other rows."""
    draw = random.Random(35)
    text, other = [77] * 40, [78] * 24
    driver = FusionDriver(tiny_dir, page_size=1)
    asks = [build(draw, [text, other], 4, 6, ratio=ratio) for ratio in (0.2, 0.4)]
    for one in asks:
        for method in METHODS:
            driver.fuse(f"{len(driver.asks)}", replace(one, prompt=asks[0].prompt, method=method), logprobs=0)
            driver.run()
    check(driver, reference)


@pytest.mark.parametrize("method", METHODS)
def test_turns_that_come_in_another_order(tiny_dir, reference, method):
    """The longest first: its rows are not those of a shorter prompt's answer, even if the same were chosen."""
    draw = random.Random(27)
    whole = build(draw, [draw_tokens(draw, 40), draw_tokens(draw, 40)], 5, 60, method=method)
    driver = FusionDriver(tiny_dir, page_size=4)
    for length in (125, 101, 113, 145, 125):
        driver.fuse(f"{len(driver.asks)}", replace(whole, prompt=whole.prompt[:length]), logprobs=0)
        driver.run()
    check(driver, reference)
    chosen_for = [len(driver.first_turn(rid).prompt) for rid in driver.asks]
    looks = method in ("a3", "cacheblend", "prophetkv")
    assert chosen_for == ([125, 101, 101, 125, 125] if looks else [125, 101, 113, 145, 125])


@pytest.mark.parametrize("method", DENSE)
def test_the_row_behind_the_fused_ones_is_not_computed_ahead(tiny_dir, reference, method):
    """It reads the stored KV of layer 1; the last of 31 rows is a step of one row, as decoding is."""
    draw = random.Random(36)
    driver = FusionDriver(tiny_dir, overlap="on", step_tokens=6)
    driver.fuse("a", build(draw, [draw_tokens(draw, 40), draw_tokens(draw, 24)], 5, 7, method=method), logprobs=0)
    driver.run()
    check(driver, reference)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_ends_with_a_document(tiny_dir, reference, method):
    """Its last row is computed, and asks; behind more text it is a row of the document."""
    draw = random.Random(31)
    one = build(draw, [draw_tokens(draw, 40), draw_tokens(draw, 31)], 5, 0, method=method)
    driver = FusionDriver(tiny_dir, page_size=1)
    for i in range(2):
        driver.fuse(f"{i}", one, logprobs=0)
        driver.run()
    driver.fuse("later", replace(one, prompt=(*one.prompt, *driver.tokens["0"], 77)), logprobs=0)
    driver.fuse("again", replace(one, prompt=(*one.prompt, one.prompt[-1], *driver.tokens["0"])), logprobs=0)
    driver.fuse("alone", Ask((9,), ((0, 1),), method, one.ratio), logprobs=0)
    driver.run()
    check(driver, reference)


def test_choices_are_forgotten_when_they_have_too_many_rows(tiny_dir, reference, monkeypatch):
    """The oldest conversation first; its rows are chosen anew, and are the same."""
    monkeypatch.setattr("runtime.reuse.fusion.choices.MOST_ROWS", 60)
    draw, driver = random.Random(41), FusionDriver(tiny_dir, page_size=16)
    choices = driver.core.strategies["fusion"]._choices
    asks = [build(draw, [draw_tokens(draw, 80)], 16, 9, method="a3", ratio=0.3) for _ in range(4)]
    for i, ask in enumerate([*asks, asks[0], asks[3]]):
        driver.fuse(f"{i}", ask)
        driver.run()
        assert 0 < sum(len(chosen) + 1 for turns in choices._known.values() for _, _, chosen in turns) <= 60
    assert driver.selected("4") == driver.selected("0")
    check(driver, reference)


# -- pins --------------------------------------------------------------------------------------------------------


def test_documents_are_encoded_ahead_and_pinned(tiny_dir, reference):
    draw = random.Random(22)
    text = draw_tokens(draw, 80)
    driver = FusionDriver(tiny_dir, pool_tokens=640, pin_budget=0.5, page_size=16)
    reuse = {"method": "fusion", "select": "pie", "documents": [[0, 80]], "names": ["a"], "granularity": "page",
             "chunk_tokens": 32}  # fmt: skip
    pins = call(driver.core, AddPin(array("i", text).tobytes(), reuse=reuse, ttl_s=60))["pins"]
    assert sorted(one["tokens"] for one in pins) == [16, 32, 32], "one for each chunk"
    assert driver.row_layers <= LAYERS * (80 + 1)
    driver.flush()
    for i in range(12):
        driver.add(f"flood {i}", draw_tokens(draw, 60), max_new_tokens=NEW)
    driver.run()
    driver.fuse("a", build(draw, [text], 7))
    driver.run()
    check(driver, reference)
    assert driver.cached("a") == 80
    assert len(call(driver.core, GetPins())["pins"]) == 3
    for one in pins:
        assert call(driver.core, RemovePin(one["id"]))["found"]
    assert driver.flush()["live_tokens"] == 0


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"documents": "all"}, {"granularity": "word"}, {"names": [7, 8]}, {"ratio": "half"}]
)
def test_bad_fields_are_refused(tiny_dir, fields):
    draw = random.Random(23)
    driver = FusionDriver(tiny_dir)
    one = build(draw, [draw_tokens(draw, 8), draw_tokens(draw, 8)])
    driver.fuse("a", one, asked=fields)
    assert driver.finish["a"].refused, driver.finish["a"]
    assert driver.finish["a"].message
    assert not driver.core.requests
    driver.check_idle()


def test_refusals_beside_the_fields(tiny_dir):
    draw = random.Random(24)
    driver = FusionDriver(tiny_dir, pool_tokens=160)
    one = build(draw, [draw_tokens(draw, 8)])
    driver.fuse("logprobs", one, prompt_logprobs_from=0)
    driver.fuse("pages", build(draw, [draw_tokens(draw, 120)]), 100)
    driver.fuse("token", replace(one, prompt=(*one.prompt[:-1], VOCAB)))
    driver.fuse("context", build(draw, [draw_tokens(draw, 600)]))
    for rid in ("logprobs", "pages", "token", "context"):
        assert driver.finish[rid].refused, rid
    assert {driver.finish[rid].code for rid in ("pages", "context")} == {"context_length_exceeded"}
    assert not driver.core.requests
    driver.fuse("no bound", build(draw, [draw_tokens(draw, 30)]), sampling={"max_new_tokens": None})
    driver.run()
    assert driver.finish["no bound"].type == "length"
    assert len(driver.tokens["no bound"]) > 50

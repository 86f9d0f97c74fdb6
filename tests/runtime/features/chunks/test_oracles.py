"""Fused requests against the plain reading of the papers, and against full prefill where they must equal it."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.engine.driver import greedy
from tests.runtime.features.chunks.asks import Library, selected
from tests.runtime.features.chunks.plain import draw_tokens
from tests.runtime.features.chunks.reference import METHODS, UNSCALED, Ask
from tests.runtime.reuse.contract.subject import NEW, World
from tests.runtime.reuse.contract.subjects import CLOSE, Fusion, load

KINDS = ("llama", "llama_llama3", "llama_yarn")
WAYS: list[dict[str, Any]] = [
    *({"method": method} | ({"ratio": None} if method in UNSCALED else {}) for method in METHODS),
    {"method": "legolink", "ratio": None, "k": 5},
]


def name_of(fields: dict[str, Any]) -> str:
    return "-".join(str(value) for value in fields.values() if value is not None)


def around(draw: random.Random, **fields: Any) -> Ask:
    """A system prompt, three documents with text between two of them, and a question."""
    system, first, second, third, between, question = (draw_tokens(draw, n) for n in (19, 50, 33, 40, 5, 9))
    prompt = system + first + second + between + third + question
    documents = ((19, 69), (69, 102), (107, 147))
    return Ask(tuple(prompt), documents, **({"ratio": 0.3, "chunk_tokens": 20} | fields))


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("fields", WAYS, ids=name_of)
def test_every_method_answers_as_its_paper_has_it(rope_dirs, fields, granularity):
    """Several rotary embeddings, pages, chunks of prefill and backends, cold and warm, alone and in one batch."""
    draw = random.Random(f"{fields} {granularity}")
    for kind, page_size, step_tokens, kernels in zip(
        KINDS, (16, 1, 4), (7, 256, 64), ("auto", "torch", "auto"), strict=True
    ):
        world = World(Fusion(rope_dirs[kind]), page_size=page_size, step_tokens=step_tokens, kernels=kernels)
        one = around(draw, granularity=granularity, **fields)
        world.one("cold", one, logprobs=0)
        world.ask("warm", one, logprobs=0)
        world.ask("beside", around(draw, granularity=granularity, **fields))
        world.run()
        world.check()


@pytest.mark.parametrize("method", ["a3", "cacheblend", "prophetkv", "passages", "legolink"])
def test_nothing_recomputed_is_pie(ids_dir, method):
    one = around(random.Random(3), method=method, ratio=0.0)
    found = []
    for ask in (one, replace(one, method="pie", ratio=None)):
        world = World(Fusion(ids_dir))
        world.one("a", ask, 8, logprobs=0)
        told = [one.logprob for event in world.events["a"] for one in event.logprobs]
        found.append((world.tokens["a"], told, selected(world, "a"), world.row_layers))
    assert found[0] == found[1]


@pytest.mark.parametrize("fields", WAYS, ids=name_of)
def test_the_order_of_hits_and_misses_changes_nothing(ids_dir, fields):
    """Each document cached or not, in any combination: the same rows, and the same answer."""
    one = around(random.Random(4), granularity="page", **fields)
    answers = []
    for cached in range(8):
        world = World(Fusion(ids_dir), page_size=4)
        for i, (start, stop) in enumerate(one.documents):
            if cached >> i & 1:
                alone = Ask((9, *one.prompt[start:stop], 9), ((1, 1 + stop - start),), "pie", None, chunk_tokens=20)
                world.one(f"ahead {i}", alone)
        world.one("a", one, logprobs=0)
        found = sum(stop - start for i, (start, stop) in enumerate(one.documents) if cached >> i & 1)
        assert world.cached("a") == found
        told = [one.logprob for event in world.events["a"] for one in event.logprobs]
        answers.append((world.tokens["a"], selected(world, "a"), told))
    world.check()
    for tokens, rows, told in answers[1:]:
        assert (tokens, rows) == answers[0][:2]
        assert told == pytest.approx(answers[0][2], abs=CLOSE)


@settings(max_examples=45, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), data=st.data())
def test_drawn_prompts_answer_as_the_papers_have_it(rope_dirs, seed, data):
    kind = data.draw(st.sampled_from(KINDS))
    options = {
        "page_size": data.draw(st.sampled_from([1, 4, 16])),
        "step_tokens": data.draw(st.sampled_from([7, 64, 512])),
        "chunk_tokens": data.draw(st.sampled_from([None, 3, 16])),
        "overlap": data.draw(st.sampled_from(["on", "off"])),
        "kernels": data.draw(st.sampled_from(["torch", "auto"])),
    }
    draw = random.Random(seed)
    library, world = Library(draw), World(Fusion(rope_dirs[kind]), **options)
    for i in range(data.draw(st.integers(1, 3))):
        world.ask(f"{i}", library.ask(), logprobs=draw.choice([None, 0]))
        for _ in range(data.draw(st.sampled_from([0, 3, 1000]))):
            if world.core.busy:
                world.step()
    world.run()
    world.check()


@pytest.mark.parametrize("count", [1, 16, 60])
def test_documents_behind_a_lead(ids_dir, count):
    """Its rows are read by nobody; the same documents alone are others; with all rows computed again it is exact."""
    draw = random.Random(count)
    one = around(draw, method="passages", lead=tuple(draw_tokens(draw, count)))
    world = World(Fusion(ids_dir), page_size=4, step_tokens=50)
    world.one("a", one, logprobs=0)
    pages = [p for n in world.tree.nodes() if n.namespace.entry.startswith("document") for p in n.pages]
    assert len(pages) == sum(-(-len(chunk) // 4) for chunk in one.chunks)
    world.one("pie", replace(one, method="pie", ratio=None), logprobs=0)
    assert world.report("pie")["computed_documents"] == []
    for name, lead in (("alone", ()), ("other", (*one.lead, 5))):
        world.one(name, replace(one, lead=lead), logprobs=0)
        assert world.report(name)["computed_documents"] == ["document 0", "document 1", "document 2"]
    world.one("whole", replace(one, ratio=1.0))
    assert (world.tokens["whole"], world.report("whole")["exact"]) == (greedy(load(ids_dir), [*one.prompt], NEW), True)
    first = Ask(one.prompt, ((0, 50),), "pie", None, chunk_tokens=64)
    for lead in ((), one.lead):
        world.one(f"first {lead}", replace(first, lead=lead))
        assert world.report(f"first {lead}")["exact"] == (not lead)
    world.check()


def test_documents_share_the_pages_and_the_rows_of_their_lead(ids_dir):
    """In a pool that has no room for a lead of each."""
    draw = random.Random(1)
    one = around(draw, method="passages", lead=tuple(draw_tokens(draw, 60)))
    world = World(Fusion(ids_dir), page_size=4, step_tokens=50, pool_tokens=360)
    rows = []
    run = world.core.executor.run
    world.core.executor.run = lambda batch: rows.append(len(batch.tokens)) or run(batch)
    world.one("a", one, logprobs=0)
    world.check()
    chunks, looked, decoded = sum(map(len, one.chunks)), len(one.prompt) - 123, NEW
    computed = looked + world.report("a")["recomputed_rows"]
    assert sum(rows) <= len(one.lead) + chunks + looked + computed + decoded + 19, "and the system prompt's pages"


def test_a_document_behind_a_lead_fits_into_the_context(ids_dir):
    draw = random.Random(2)
    lead, prompt = tuple(draw_tokens(draw, 60)), tuple(draw_tokens(draw, 150))
    world = World(Fusion(ids_dir), context_length=170)
    world.one("a", Ask(prompt, ((0, 140),), "passages", 0.3, chunk_tokens=512, lead=lead))
    assert len(world.tokens["a"]) == NEW
    assert world.report("a")["computed_documents"] == ["document 0"]


@torch.inference_mode()
def test_stored_keys_are_not_touched(ids_dir):
    """A document is read where it lies: nobody moves its keys in memory, nor writes over its rows."""
    draw = random.Random(6)
    text = draw_tokens(draw, 48)
    world = World(Fusion(ids_dir), page_size=16)
    world.one("ahead", Ask((*text, 9), ((0, 48),), "pie", None, chunk_tokens=64))
    cache, pool = world.core.cache, world.core.executor.pool
    slots = [page * 16 + row for node in cache.tree.nodes() for page in node.pages for row in range(16)]
    before = pool.k[:, slots].clone(), pool.v[:, slots].clone()
    for i, method in enumerate(["a3", "cacheblend", "prophetkv", "legolink", "full"]):
        prompt = (*draw_tokens(draw, 7 + i), *text, *draw_tokens(draw, 6))
        world.ask(method, Ask(prompt, ((7 + i, 55 + i),), method, 0.4, chunk_tokens=64))
    world.run()
    assert torch.equal(pool.k[:, slots], before[0])
    assert torch.equal(pool.v[:, slots], before[1])

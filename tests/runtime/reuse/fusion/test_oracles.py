"""Fused requests against the plain reading of the papers, and against full prefill where they must equal it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.execution.attention.stand_in import options_of
from tests.runtime.reuse.fusion.driver import CLOSE, FusionDriver, Library, check, check_answer
from tests.runtime.reuse.fusion.reference import Ask
from tests.runtime.reuse.modules.plain import Reference as ModuleReference
from tests.runtime.reuse.modules.plain import draw_prompt, draw_schema, draw_tokens

KINDS = ("llama", "llama_llama3", "llama_yarn")
METHODS = [
    {"method": "a3"},
    {"method": "cacheblend"},
    {"method": "random"},
    {"method": "prophetkv"},
    {"method": "legolink"},
    {"method": "legolink", "ratio": None, "k": 5},
    {"method": "pie", "ratio": None},
    {"method": "full", "ratio": None, "variant": "cat"},
    {"method": "full", "ratio": None, "variant": "local"},
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
@pytest.mark.parametrize("fields", METHODS, ids=name_of)
def test_every_method_answers_as_its_paper_has_it(rope_dirs, references, fields, granularity):
    """Several rotary embeddings, pages, chunks of prefill and backends, cold and warm, alone and in one batch."""
    draw = random.Random(f"{fields} {granularity}")
    for kind, page_size, step_tokens, native in zip(KINDS, (16, 1, 4), (7, 256, 64), (True, False, True), strict=True):
        driver = FusionDriver(rope_dirs[kind], page_size=page_size, step_tokens=step_tokens, native_kernels=native)
        one = around(draw, granularity=granularity, **fields)
        driver.fuse("cold", one, logprobs=0)
        driver.run()
        driver.fuse("warm", one, logprobs=0)
        driver.fuse("beside", around(draw, granularity=granularity, **fields))
        driver.run()
        check(driver, references[kind])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("method", ["a3", "cacheblend", "random", "prophetkv", "legolink"])
def test_everything_recomputed_is_full_prefill(tiny_dir, references, method, granularity, native):
    one = around(random.Random(1), method=method, ratio=1.0, granularity=granularity)
    driver = FusionDriver(tiny_dir, page_size=16, native_kernels=native)
    driver.fuse("fused", one, 8, logprobs=0)
    driver.add("prefill", one.prompt, max_new_tokens=8)
    driver.run()
    assert driver.tokens["fused"] == driver.tokens["prefill"]
    check_answer(driver, "fused", references["llama"].dense(one.prompt, driver.tokens["fused"]))


def test_one_document_at_the_beginning_is_a_prefix(tiny_dir, references):
    tokens = draw_tokens(random.Random(2), 70)
    driver = FusionDriver(tiny_dir, page_size=16)
    for i in range(2):
        driver.fuse(str(i), Ask(tuple(tokens), ((0, 60),), "pie", None, chunk_tokens=64), logprobs=0)
        driver.run()
        check_answer(driver, str(i), references["llama"].dense(tokens, driver.tokens[str(i)]))


@pytest.mark.parametrize("method", ["a3", "cacheblend", "random", "prophetkv", "legolink"])
def test_nothing_recomputed_is_pie(tiny_dir, method):
    one = around(random.Random(3), method=method, ratio=0.0)
    found = []
    for ask in (one, replace(one, method="pie", ratio=None)):
        driver = FusionDriver(tiny_dir)
        driver.fuse("a", ask, 8, logprobs=0)
        driver.run()
        told = [one.logprob for event in driver.events["a"] for one in event.logprobs]
        found.append((driver.tokens["a"], told, driver.selected("a"), driver.row_layers))
    assert found[0] == found[1]


@pytest.mark.parametrize("fields", METHODS, ids=name_of)
def test_the_order_of_hits_and_misses_changes_nothing(tiny_dir, references, fields):
    """Each document cached or not, in any combination: the same rows, and the same answer."""
    one = around(random.Random(4), granularity="page", **fields)
    answers = []
    for cached in range(8):
        driver = FusionDriver(tiny_dir, page_size=4)
        for i, (start, stop) in enumerate(one.documents):
            if cached >> i & 1:
                alone = Ask((9, *one.prompt[start:stop], 9), ((1, 1 + stop - start),), "pie", None, chunk_tokens=20)
                driver.fuse(f"ahead {i}", alone)
                driver.run()
        driver.fuse("a", one, logprobs=0)
        driver.run()
        found = sum(stop - start for i, (start, stop) in enumerate(one.documents) if cached >> i & 1)
        assert driver.events["a"][-1].cached_tokens == found
        told = [one.logprob for event in driver.events["a"] for one in event.logprobs]
        answers.append((driver.tokens["a"], driver.selected("a"), told))
    check(driver, references["llama"])
    for tokens, selected, told in answers[1:]:
        assert (tokens, selected) == answers[0][:2]
        assert told == pytest.approx(answers[0][2], abs=CLOSE)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), data=st.data())
def test_drawn_prompts_answer_as_the_papers_have_it(rope_dirs, references, seed, data):
    kind = data.draw(st.sampled_from(KINDS))
    options = {
        "page_size": data.draw(st.sampled_from([1, 4, 16])),
        "step_tokens": data.draw(st.sampled_from([7, 64, 512])),
        "chunk_tokens": data.draw(st.sampled_from([None, 3, 16])),
        "overlap": data.draw(st.sampled_from(["on", "off"])),
        "native_kernels": data.draw(st.booleans()),
    }
    draw = random.Random(seed)
    library, driver = Library(draw), FusionDriver(rope_dirs[kind], **options)
    for i in range(data.draw(st.integers(1, 3))):
        driver.fuse(f"{i}", library.ask(), logprobs=draw.choice([None, 0]))
        for _ in range(data.draw(st.sampled_from([0, 3, 1000]))):
            if driver.core.busy:
                driver.step()
    driver.run()
    check(driver, references[kind])


@pytest.mark.parametrize(
    ("backend", "page_size", "requests"),
    [("torch", 1, 20), ("torch", 16, 16), ("native", 1, 24), ("native", 16, 24), ("flashinfer", 16, 8)],
)
def test_random_lives_answer_as_the_papers_have_it(tiny_dir, references, monkeypatch, backend, page_size, requests):
    """Batches with ordinary requests and modules, a pool that is too small, aborts, flushes and a step ahead."""
    draw = random.Random(f"{backend} {page_size}")
    evicted = aborted = 0
    for life in range(2):
        options = {
            "page_size": page_size,
            "pool_tokens": [288, draw.choice([640, 4096])][life],
            "step_tokens": [draw.choice([64, 256]), 7][life],
            "chunk_tokens": draw.choice([3, 16, None]),
            "max_running": [16, 3][life],
            "overlap": draw.choice(["on", "off"]),
            "schedule_policy": draw.choice(["fcfs", "lpm", "dfs", "balanced"]),
            **options_of(backend, monkeypatch),
        }
        driver = FusionDriver(tiny_dir, **options)
        gone = live(driver, draw, requests // 2, [24, 70][life])
        aborted += len(gone)
        check(driver, references["llama"], None)
        modules = ModuleReference(tiny_dir)
        for rid, prompt in driver.prompts.items():
            assert driver.tokens[rid] == modules.best(prompt, driver.tokens[rid]), rid
        refused = [finish.message for finish in driver.finish.values() if finish.type == "error"]
        assert len(refused) <= requests // 4
        assert all("the KV pool has" in message for message in refused)
        evicted += driver.core.admin.state()["evicted_tokens_by_cause"]["room"]
    assert (aborted and evicted) or backend == "flashinfer"


def live(driver: FusionDriver, draw: random.Random, count: int, longest: int) -> set[str]:
    """Run random requests, with documents up to `longest` tokens; returns those that were aborted."""
    library, schema = Library(draw, longest), draw_schema(draw, "schema")
    aborted: set[str] = set()

    def between(step: int) -> None:
        alive = [rid for rid in driver.tokens if rid not in driver.finish]
        if alive and draw.random() < 0.02:
            rid = draw.choice(alive)
            aborted.add(rid)
            driver.abort(rid)
        if draw.random() < 0.02:
            driver.flush()
        if len(driver.tokens) < count and draw.random() < 0.5:
            add()

    def add() -> None:
        rid, outputs = f"r{len(driver.tokens)}", draw.choice([2, 24, 100])
        kind = draw.choice(["fused", "fused", "fused", "plain", "modules"])
        if kind == "fused":
            driver.fuse(rid, library.ask(), outputs, logprobs=draw.choice([None, 0]))
        elif kind == "plain":
            driver.add(rid, library.ask().prompt, max_new_tokens=outputs)
        else:
            driver.ask(rid, draw_prompt(draw, schema), outputs)

    while len(driver.tokens) < count:
        for _ in range(count // 2):
            add()
        driver.run(between)
    return aborted


@torch.inference_mode()
def test_stored_keys_are_not_touched(tiny_dir):
    """A document is read where it lies: nobody moves its keys in memory, nor writes over its rows."""
    draw = random.Random(6)
    text = draw_tokens(draw, 48)
    driver = FusionDriver(tiny_dir, page_size=16)
    driver.fuse("ahead", Ask((*text, 9), ((0, 48),), "pie", None, chunk_tokens=64))
    driver.run()
    cache, pool = driver.core.cache, driver.core.executor.pool
    slots = [page * 16 + row for node in cache.tree.nodes() for page in node.pages for row in range(16)]
    before = pool.k[:, slots].clone(), pool.v[:, slots].clone()
    for i, method in enumerate(["a3", "cacheblend", "prophetkv", "legolink", "full"]):
        prompt = (*draw_tokens(draw, 7 + i), *text, *draw_tokens(draw, 6))
        driver.fuse(method, Ask(prompt, ((7 + i, 55 + i),), method, 0.4, chunk_tokens=64))
    driver.run()
    assert torch.equal(pool.k[:, slots], before[0])
    assert torch.equal(pool.v[:, slots], before[1])

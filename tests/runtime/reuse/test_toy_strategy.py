"""A strategy that nobody serves: arbitrary cached segments at arbitrary positions, by the interface alone.

A request reads entries, each computed alone at a position of its own, moved to any position, valid in some layers and
with pages left out, and computes its own tokens with gaps in their positions. `transformers` gives the same tokens with
`position_ids` and a mask for each layer.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from radix import Namespace
from runtime.batch import causal_visible
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from runtime.request import Request, Segment, Work
from runtime.reuse.build import Read, RowSet, Stage
from runtime.reuse.strategy import Found, Strategy
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.attention.stand_in import options_of
from tests.tiny import VOCAB, save_tiny

CONTEXT = 16384
LAYERS = 3
NEW = 4


# -- the strategy --------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """Tokens that are computed alone from position `base` on, and how one request reads them."""

    tokens: list[int]
    base: int
    position: int
    layers: tuple[int, int] | None = None
    dropped: tuple[int, ...] = ()


@dataclass
class State:
    """The entries of a request, and those that it computes itself: page ids and how many rows are done."""

    entries: list[Entry]
    pages: dict[int, array[int]] = field(default_factory=dict)
    done: int = 0


class Toy(Strategy):
    """Reads entries wherever a request wants them; missing ones are computed by the first request that reads them."""

    name = "toy"
    counted = ("toy_entries",)

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        request.reuse = State([Entry(**entry) for entry in asked["entries"]])
        request.sequence.anchors = [tuple(anchor) for anchor in asked["anchors"]]

    def _key(self, entry: Entry) -> bytes:
        """Whole pages: what the last one lacks is -1, which no token is."""
        return array("i", entry.tokens + [-1] * (-len(entry.tokens) % self.cache.page_size)).tobytes()

    def _namespace(self, request: Request, entry: Entry) -> Namespace:
        return request.namespace.for_entry("toy", f"{hash((entry.base, *entry.tokens)):x}")

    def find(self, request: Request) -> Found:
        found = {}
        for i, entry in enumerate(request.reuse.entries):
            key = self._key(entry)
            match = self.cache.tree.match(key, self._namespace(request, entry))
            if len(match.pages) == self.cache.pages_for(len(entry.tokens)):
                found[i] = match
        return Found(sum(len(request.reuse.entries[i].tokens) for i in found), found)

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        mine = {
            self._namespace(request, entry) for i, entry in enumerate(request.reuse.entries) if i not in found.detail
        }
        for other in computing:
            if isinstance(other.reuse, State):
                computes = {self._namespace(other, other.reuse.entries[i]) for i in other.reuse.pages}
                if mine & computes:
                    return other, 0
        return None

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        cache, state = self.cache, request.reuse
        nodes = {i: cache.tree.lock_match(match) for i, match in found.detail.items()}
        sizes = {i: cache.pages_for(len(e.tokens)) for i, e in enumerate(state.entries) if i not in nodes}
        own = cache.pages_for(len(request.tokens))
        need = own + sum(sizes.values())
        fresh = None
        if need + headroom <= cache.num_available:
            fresh = cache.allocate(need, array("i"), request.namespace)
        if fresh is None:
            for node in nodes.values():
                cache.tree.unlock(node)
            return False
        for node in nodes.values():
            cache.tree.use(node)
        request.segments = [self._segment(state.entries[i], match.pages, nodes[i]) for i, match in found.detail.items()]
        for i, size in sizes.items():
            state.pages[i], fresh = fresh[:size], fresh[size:]
            request.segments.append(Segment(state.pages[i], 0))  # owned, and not read before it is in the tree
        request.sequence.pages = fresh
        request.cached_tokens = max(request.cached_tokens, found.tokens)
        return True

    def _segment(self, entry: Entry, pages: array[int], node: Any) -> Segment:
        last = len(pages) - 1
        kept = [i for i in range(len(pages)) if i not in entry.dropped]
        length = len(kept) * self.cache.page_size
        if last in kept:
            length -= -len(entry.tokens) % self.cache.page_size
        layers = None if entry.layers is None else range(*entry.layers)
        read = array("i", [pages[i] for i in kept])
        return Segment(read, length, entry.position, entry.position - entry.base, layers, node=node)

    def work(self, request: Request, limit: int) -> Work:
        state = request.reuse
        for i in state.pages:
            count = min(limit, len(state.entries[i].tokens) - state.done)
            return Work(request, state.done, count, count, detail=i)
        return super().work(request, limit)

    def rows(self, work: Work) -> list[RowSet]:
        if work.detail is None:
            return super().rows(work)
        state, stop, page_size = work.request.reuse, work.start + work.count, self.cache.page_size
        entry, indices = state.entries[work.detail], np.arange(work.start, stop)
        pages = np.frombuffer(state.pages[work.detail], dtype=np.int32)
        writes = pages[indices // page_size].astype(np.int64) * page_size + indices % page_size
        read = Read(pages[: -(-stop // page_size)], stop, visible=causal_visible(stop, work.count))
        tokens = np.array(entry.tokens[work.start : stop], dtype=np.int64)
        stage = Stage(range(self.num_layers), writes, [read])
        return [RowSet(tokens, indices + entry.base, [stage], np.empty(0, dtype=np.int64))]

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, state = work.request, work.request.reuse
        if work.detail is None:
            request.sequence.num_computed += work.count
            return True
        state.done += work.count
        entry = state.entries[work.detail]
        if state.done == len(entry.tokens):
            pages = state.pages.pop(work.detail)
            state.done = 0
            request.segments = [s for s in request.segments if s.node is not None or s.pages != pages]
            node, held = self.cache.insert(self._key(entry), pages, self._namespace(request, entry), seconds)
            self.cache.tree.lock(node)
            request.segments.append(self._segment(entry, held, node))
            self.counters["toy_entries"] += 1
        return False

    def release(self, request: Request, keep: bool) -> None:
        self.cache.release(request)
        request.reuse.pages, request.reuse.done = {}, 0

    def report(self, request: Request) -> dict[str, Any]:
        return {"strategy": self.name, "row_layers": request.row_layers}


# -- the reference -------------------------------------------------------------------------------------------


class Reference:
    """transformers with explicit positions, and for every layer a mask of its own."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._masks: list[torch.Tensor] = []
        for i, layer in enumerate(self.model.model.layers):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, i=i: (args, {**kwargs, "attention_mask": self._masks[i]}), with_kwargs=True
            )

    @torch.inference_mode()
    def logits(self, entries: list[Entry], page_size: int, tokens: list[int], positions: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab], after each token."""
        ids, where, spans = [], [], []
        for entry in entries:
            spans.append((len(ids), len(ids) + len(entry.tokens)))
            ids += entry.tokens
            where += range(entry.position, entry.position + len(entry.tokens))
        own, total = len(ids), len(ids) + len(tokens)
        self._masks = []
        for layer in range(LAYERS):
            sees = torch.zeros(total, total, dtype=torch.bool)
            for entry, (start, stop) in zip(entries, spans, strict=True):
                sees[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
                if entry.layers is None or layer in range(*entry.layers):
                    kept = [i for i in range(stop - start) if i // page_size not in entry.dropped]
                    sees[own:, [start + i for i in kept]] = True
            sees[own:, own:] = torch.ones(total - own, total - own).tril().bool()
            self._masks.append(torch.zeros(total, total).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None])
        return self.model(torch.tensor([ids + tokens]), position_ids=torch.tensor([where + positions])).logits[0, own:]

    def best(self, asked: dict[str, Any], tokens: list[int], answer: list[int], page_size: int) -> list[int]:
        """The most likely tokens after the prompt, and after each token of the answer but its last."""
        text, entries = tokens + answer[:-1], [Entry(**entry) for entry in asked["entries"]]
        positions = [position_of(asked["anchors"], i) for i in range(len(text))]
        return self.logits(entries, page_size, text, positions)[len(tokens) - 1 :].argmax(-1).tolist()


def position_of(anchors: list[list[int]], index: int) -> int:
    at, position = max(anchor for anchor in anchors if anchor[0] <= index)
    return position + index - at


# -- drawing requests ----------------------------------------------------------------------------------------


def draw_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(count)]


def draw_request(draw: random.Random, pool: list[tuple[list[int], int]], page_size: int) -> tuple[dict, list[int]]:
    """Entries of a pool that requests share, and own tokens with gaps between, before and behind them."""
    entries = []
    for tokens, base in draw.sample(pool, draw.randrange(0, 4)):
        pages = -(-len(tokens) // page_size)
        dropped = draw.sample(range(pages), draw.randrange(0, pages)) if draw.random() < 0.5 else []
        first = draw.randrange(LAYERS)
        layers = draw.choice([None, None, (first, draw.randrange(first, LAYERS) + 1)])
        position = draw.choice([base, draw.randrange(400), draw.randrange(4000, 12000)])
        entries.append({
            "tokens": tokens, "base": base, "position": position, "layers": layers, "dropped": tuple(dropped),
        })  # fmt: skip
    tokens = draw_tokens(draw, draw.randrange(2, 40))
    anchors, position = [[0, draw.randrange(0, 300)]], 0
    for index in sorted(draw.sample(range(1, len(tokens)), min(2, len(tokens) - 1))):
        position = position_of(anchors, index) + draw.choice([0, 3, 500])
        anchors.append([index, position])
    return {"method": "toy", "entries": entries, "anchors": anchors}, tokens


class ToyDriver(Driver):
    """Toy and ordinary requests on one core."""

    def __init__(self, path: Path, **options: Any):
        core = make_core(path, context_length=CONTEXT, **options)
        super().__init__(core)
        self.asked: dict[str, tuple[dict | None, list[int]]] = {}
        core.add_strategy(Toy(core.cache, LAYERS))

    def toy(self, rid: str, asked: dict[str, Any], tokens: list[int], count: int = NEW, **options: Any) -> None:
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=count).model_dump()
        self.tokens[rid], self.events[rid] = [], []
        self.asked[rid] = asked, tokens
        message = AddRequest(rid, array("i", tokens).tobytes(), sampling, reuse=asked, **options)
        answer = self.core.handle(message)
        if answer is not None:
            self.take(answer.events)


@pytest.fixture(scope="module", params=["llama", "llama_llama3", "llama_yarn"])
def long_dir(request, tmp_path_factory, default_model_dir) -> Path:
    """A small random model with a long context."""
    path = save_tiny(request.param, tmp_path_factory.mktemp(request.param), default_model_dir)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def reference(long_dir) -> Reference:
    return Reference(long_dir)


BACKENDS = ["torch", "native", "flashinfer"]


# -- random lives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_lives_give_the_tokens_of_transformers(long_dir, reference, monkeypatch, backend, page_size, seed):
    """Chunks, batches with ordinary requests, a pool that is too small, aborts, flushes and a step ahead."""
    draw = random.Random(f"{backend} {page_size} {seed}")
    options = {
        "page_size": page_size,
        "pool_tokens": draw.choice([320, 4096]),
        "step_tokens": draw.choice([7, 64, 256]),
        "chunk_tokens": draw.choice([3, 16, None]),
        "max_running": draw.choice([3, 16]),
        "overlap": draw.choice(["on", "off"]),
        **options_of(backend, monkeypatch),
    }
    driver = ToyDriver(long_dir, **options)
    pool = [(draw_tokens(draw, draw.randrange(1, 60)), draw.choice([0, 0, 17, 5000])) for _ in range(6)]
    aborted: set[str] = set()

    def between(step: int) -> None:
        live = [rid for rid in driver.tokens if rid not in driver.finish]
        if live and draw.random() < 0.05:
            rid = draw.choice(live)
            aborted.add(rid)
            driver.abort(rid)
        if draw.random() < 0.05:
            driver.flush()
        if len(driver.tokens) < 14 and draw.random() < 0.5:
            add()

    def add() -> None:
        rid = f"r{len(driver.tokens)}"
        if draw.random() < 0.3:
            tokens = pool[0][0] + draw_tokens(draw, draw.randrange(1, 30))
            driver.asked[rid] = None, tokens
            driver.add(rid, tokens, max_new_tokens=NEW)
        else:
            driver.toy(rid, *draw_request(draw, pool, page_size))

    add()
    add()
    driver.run(between)
    compared = 0
    for rid, (asked, tokens) in driver.asked.items():
        ordinary = {"entries": [], "anchors": [[0, 0]]}
        got = driver.tokens[rid]
        assert not got or got == reference.best(asked or ordinary, tokens, got, page_size), (rid, asked, tokens)
        assert rid in aborted or len(got) == NEW
        compared += len(got)
    assert compared > 20


def test_a_pool_that_is_too_small_retracts(long_dir, reference):
    """Own rows and entries that were evicted are computed again, and nothing of them lies under exact keys."""
    draw = random.Random(5)
    driver = ToyDriver(long_dir, page_size=1, pool_tokens=150, max_running=16)
    entries = [
        {"tokens": draw_tokens(draw, 20), "base": 0, "position": 100 * i, "layers": None, "dropped": ()}
        for i in range(4)
    ]
    asked = [{"method": "toy", "entries": [entries[i]], "anchors": [[0, 700 + i]]} for i in range(4)]
    prompts = [draw_tokens(draw, 14) for _ in range(4)]
    for i in range(4):
        driver.toy(str(i), asked[i], prompts[i], 30)
    driver.run()
    assert driver.core.scheduler.num_retracted > 0
    assert driver.core.counters["toy_entries"] > 4, "evicted entries are computed again"
    for i in range(4):
        assert len(driver.tokens[str(i)]) == 30
        assert driver.tokens[str(i)] == reference.best(asked[i], prompts[i], driver.tokens[str(i)], 1)
    assert {kind for namespace, _ in driver.core.cache.tree.roots() for kind in [namespace.entry[:3]]} == {"toy"}


def test_requests_wait_for_a_peer_that_computes_their_entry(long_dir, reference):
    draw = random.Random(6)
    driver = ToyDriver(long_dir, page_size=16, chunk_tokens=16)
    entry = {"tokens": draw_tokens(draw, 50), "base": 3, "position": 40, "layers": None, "dropped": (1,)}
    asked = {"method": "toy", "entries": [entry], "anchors": [[0, 200]]}
    prompts = [draw_tokens(draw, 5) for _ in range(4)]
    for i, prompt in enumerate(prompts):
        driver.toy(str(i), asked, prompt)
    blocked, run = [], driver.core.executor.run
    driver.core.executor.run = lambda batch: blocked.append(len(driver.core.scheduler.blocked)) or run(batch)
    driver.run()
    assert blocked[:4] == [3] * 4, "while the entry is computed, in four chunks"
    assert set(blocked[4:]) == {0}
    assert driver.core.counters["toy_entries"] == 1
    assert [driver.events[str(i)][-1].cached_tokens for i in range(4)] == [0, 50, 50, 50]
    for i, prompt in enumerate(prompts):
        assert len(driver.tokens[str(i)]) == NEW
        assert driver.tokens[str(i)] == reference.best(asked, prompt, driver.tokens[str(i)], 16)
    rows = [driver.events[str(i)][-1].reuse["row_layers"] for i in range(4)]
    assert rows == [LAYERS * (50 + 5 + NEW - 1), *[LAYERS * (5 + NEW - 1)] * 3], "an entry is computed once"


def test_equal_reads_become_one_edge_wherever_they_stand(long_dir):
    draw = random.Random(7)
    driver = ToyDriver(long_dir, page_size=16)
    entries = [{"tokens": draw_tokens(draw, 320), "base": 0, "position": 0} for _ in range(2)]
    others = [{"tokens": draw_tokens(draw, 32), "base": 0, "position": 900 + i} for i in range(4)]
    plans = []
    run = driver.core.executor.run
    driver.core.executor.run = lambda batch: plans.append(batch.groups[0].attention) or run(batch)
    for i in range(4):
        mine = [others[i], *entries] if i % 2 else [entries[1], others[i], entries[0]]
        driver.toy(str(i), {"method": "toy", "entries": mine, "anchors": [[0, 1500]]}, draw_tokens(draw, 3))
    driver.run()
    decode = next(plan for plan in reversed(plans) if plan.num_rows == 4)
    pages = {}
    for edge in decode.edges:
        pages.setdefault(decode.spans[edge.span].pages.tobytes(), []).append(edge)
    shared = [edges for key, edges in pages.items() if len(key) == 4 * 20]
    assert [len(edges) for edges in shared] == [1, 1], "each document is read once for all four"
    rows = [edges[0].rows for edges in shared]
    assert all(len(range(4)[r] if isinstance(r, slice) else r) == 4 for r in rows)


def test_the_largest_position_is_checked(long_dir):
    driver = ToyDriver(long_dir)
    asked = {"method": "toy", "entries": [], "anchors": [[0, CONTEXT - 4]]}
    driver.toy("over", asked, [5, 6])
    assert driver.finish["over"].refused
    assert str(CONTEXT) in driver.finish["over"].message
    driver.toy("unknown", {"method": "nothing"}, [5, 6])
    assert "nothing" in driver.finish["unknown"].message
    assert not driver.core.requests


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_within_what_it_costs_without_shifts(long_dir, reference, monkeypatch, backend):
    """The log-probability of the first token errs by a rounding of bfloat16, moved by thousands or not at all."""
    draw = random.Random(8)
    tokens, prompt = draw_tokens(draw, 48), draw_tokens(draw, 8)
    errors = {}
    driver = ToyDriver(long_dir, page_size=16, dtype="bfloat16", **options_of(backend, monkeypatch))
    for position in (0, 60, 4100, 9000):
        entry = {"tokens": tokens, "base": 0, "position": position}
        asked = {"method": "toy", "entries": [entry], "anchors": [[0, position + 48]]}
        rid = str(position)
        driver.toy(rid, asked, prompt, logprobs=0)
        driver.run()
        (logprob,) = driver.events[rid][0].logprobs
        positions = list(range(position + 48, position + 56))
        wanted = reference.logits([Entry(**entry)], 16, prompt, positions)[-1].log_softmax(-1)
        errors[position] = abs(logprob.logprob - float(wanted[logprob.token]))
    assert errors[0] > 0, "it is bfloat16"
    assert max(errors.values()) < 0.35, errors

"""Requests with documents on one core, beside ordinary ones and such with modules, and what their answers must be."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from runtime.request import Request
from tests.runtime.reuse.fusion.reference import METHODS, Ask, Reference
from tests.runtime.reuse.modules.plain import ModuleDriver, draw_tokens

NEW = 4
LAYERS = 3
CLOSE = 2e-3  # of logits and their logarithms: float32, in another order


class FusionDriver(ModuleDriver):
    """Keeps what was asked, and the engine's requests."""

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self.asks: dict[str, Ask] = {}
        self.plain: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, rid: str, prompt: Sequence[int], **options: Any) -> None:
        super().add(rid, prompt, **options)
        self.plain[rid] = list(prompt)

    def fuse(self, rid: str, ask: Ask, count: int = NEW, sampling: dict[str, Any] | None = None, **fields: Any) -> None:
        params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_new_tokens": count, **(sampling or {})})
        self.tokens[rid], self.events[rid] = [], []
        reuse = asked(ask) | fields.pop("asked", {})
        message = AddRequest(rid, array("i", ask.prompt).tobytes(), params.model_dump(), reuse=reuse, **fields)
        refused = self.core.handle(message)
        self.take(refused)
        if not refused:
            self.asks[rid], self.requests[rid] = ask, self.core.requests[rid]

    def selected(self, rid: str) -> list[int]:
        return self.requests[rid].reuse.selected.tolist()

    def first_turn(self, rid: str) -> Ask:
        """The ask for which the rows were chosen: this one, or an earlier one of which it is the continuation."""
        ask = self.asks[rid]
        first = replace(ask, prompt=ask.prompt[: self.requests[rid].reuse.selected_for])
        assert first in self.asks.values(), (rid, len(first.prompt))
        return first

    def report(self, rid: str) -> dict[str, Any]:
        return next(event.reuse for event in self.events[rid] if event.reuse)

    @property
    def row_layers(self) -> int:
        return self.core.counters["row_layers"]


def asked(ask: Ask) -> dict[str, Any]:
    """The `reuse` fields of a message."""
    fields = {
        "method": "fusion",
        "select": ask.method,
        "documents": [list(document) for document in ask.documents],
        "names": [f"document {i}" for i in range(len(ask.documents))],
        "granularity": ask.granularity,
        "chunk_tokens": ask.chunk_tokens,
    }
    if ask.ratio is not None:
        fields["ratio"] = ask.ratio
    if ask.method == "legolink":
        fields["k"] = ask.k
    return fields


def check(driver: FusionDriver, reference: Reference, count: int | None = NEW) -> None:
    """All fused requests recomputed the reference's rows and answered as it does; ordinary ones as full prefill does.

    `count`: tokens of each; None: any number, as aborted ones have.
    """
    page_size = driver.core.cache.page_size
    for rid in [*driver.asks, *driver.plain]:
        tokens = driver.tokens[rid]
        assert count is None or len(tokens) == count, (rid, driver.finish[rid])
        if not tokens:
            continue
        if rid in driver.plain:
            check_answer(driver, rid, reference.dense(driver.plain[rid], tokens))
            continue
        ask, rows = driver.asks[rid], driver.selected(rid)
        first = driver.first_turn(rid)
        assert reference.accepts(first, page_size, rows), (rid, ask, rows)
        check_answer(driver, rid, reference.logits(ask, rows, tokens, len(first.prompt)))


def check_answer(driver: FusionDriver, rid: str, logits: torch.Tensor) -> None:
    """The tokens are greedy and, where they were asked for, their log-probabilities right.

    Args:
        logits: float32 [1 + tokens, vocab], after the prompt and after each token.
    """
    tokens = torch.tensor(driver.tokens[rid])
    found = logits[:-1].gather(1, tokens[:, None])[:, 0]
    behind = logits[:-1].amax(1) - found
    assert behind.max() < CLOSE, (rid, driver.asks.get(rid), behind)
    told = [one.logprob for event in driver.events[rid] for one in event.logprobs or []]
    if told:
        expected = logits[:-1].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        off = (torch.tensor(told) - expected).abs().max()
        assert off < CLOSE, (rid, driver.asks.get(rid), off)


def row_layers(ask: Ask, rows: list[int], encoded: int, page_size: int, count: int = NEW) -> int:
    """Rows x layers of a request: what it encodes, what it looks at before it chooses, and what it computes then.

    Args:
        rows: that are recomputed.
        encoded: rows of chunks, and of the pages before the first document, that were missing.
    """
    prefix = ask.documents[0][0] // page_size * page_size
    own = len(ask.own) - prefix
    dense = len(ask.prompt) - prefix if ask.is_dense else 0
    question = LAYERS * own if ask.method == "prophetkv" and ask.count else 0
    return LAYERS * (encoded + own + len(rows) + count - 1) + dense + question


# -- drawing -----------------------------------------------------------------------------------------------------


def build(draw: random.Random, texts: list[list[int]], system: int = 0, question: int = 9, **fields) -> Ask:
    """Documents behind a system prompt of some tokens, with a question of some more."""
    prompt, documents = draw_tokens(draw, system), []
    for text in texts:
        documents.append((len(prompt), len(prompt) + len(text)))
        prompt += text
    method = fields.get("method", "a3")
    fields = {"method": method, "ratio": None if method in ("pie", "full") else 0.3, "chunk_tokens": 32} | fields
    return Ask((*prompt, *draw_tokens(draw, question)), tuple(documents), **fields)


class Library:
    """Texts that prompts share: documents up to `longest` tokens, and a system prompt of more than half of that."""

    def __init__(self, draw: random.Random, longest: int = 70):
        self._draw = draw
        self.systems = [[], draw_tokens(draw, 3), draw_tokens(draw, longest * 4 // 7)]
        lengths = [draw.choice([1, 5, 16, longest // 2, draw.randrange(1, longest)]) for _ in range(6)]
        self.documents = [draw_tokens(draw, length) for length in lengths]

    def rewind(self, seed: int) -> None:
        """Let prompts, but not the texts, depend on a seed."""
        self._draw = random.Random(seed)

    def ask(self, **fields: Any) -> Ask:
        """Some of the documents in any order, behind a system prompt and with a question; `fields` of the ask."""
        draw = self._draw
        prompt, documents = list(draw.choice(self.systems)), []
        for text in draw.sample(self.documents, draw.randrange(1, 5)):
            documents.append((len(prompt), len(prompt) + len(text)))
            prompt += text + draw_tokens(draw, draw.choice([0, 0, 0, 4]))
        prompt += draw_tokens(draw, draw.choice([0, 1, 2, 5, 20]))
        method = fields.get("method") or draw.choice(METHODS)
        drawn = {
            "method": method,
            "ratio": draw.choice([0.0, 0.05, 0.15, 0.3, 0.6, 1.0]),
            "granularity": draw.choice(["token", "page"]),
            "chunk_tokens": draw.choice([16, 20, 64]),
            "k": draw.choice([0, 1, 3, 16]),
        }
        if method == "legolink" and draw.random() < 0.5:
            drawn["ratio"] = None
        return Ask(tuple(prompt), tuple(documents), **(drawn | fields))

"""Prompts with documents on an engine core: time to the first token, rows, throughput and pages, by method."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.offline.document_methods import row_layers
from loadgen.offline.drive import Drive
from runtime.features.chunks.ask import ReuseParams
from runtime.features.chunks.documents.plan import DocumentPlanner, plan_encoding
from runtime.features.chunks.documents.prompt import TokenizedPrompt, lead_of
from runtime.models.tokenizer import Tokenizer

FULL, PREFIX = "full prefill", "prefix caching"


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a prompt: its documents, each of `length`, behind a system prompt and before a question."""

    length: int = 512
    system: int = 64
    question: int = 32


class Documents(Drive):
    """An engine core, and a library of documents that are all cached.

    Args:
        path: the model's directory.
        count: documents of the library.
        shape: of the prompts.
        options: as of `ramet serve`.
    """

    def __init__(self, path: Path, count: int, shape: Shape, **options: Any):
        super().__init__(path, **options)
        self.shape = shape
        self._system = self.text(shape.system)
        self._library = [self.text(shape.length) for _ in range(count)]
        self._planner, self._lead = DocumentPlanner(), lead_of(Tokenizer.load(path))
        self._orders: dict[tuple[int, float], tuple[int, ...]] = {}
        self.encode(self.prompt(self._library), "pie")

    def prompt(self, documents: Sequence[array[int]]) -> TokenizedPrompt:
        """System prompt, documents and a new question."""
        tokens, ranges = self._system[:], []
        for one in documents:
            ranges.append((len(tokens), len(tokens) + len(one)))
            tokens += one
        names = [f"{i}" for i in range(len(ranges))]
        return TokenizedPrompt(tokens + self.text(self.shape.question), ranges, names, self._lead)

    def encode(self, prompt: TokenizedPrompt, method: str) -> None:
        """Compute the KV of a prompt's documents, as a method reads it."""
        self.add(prompt.tokens, 1, plan_encoding(prompt, method).ask)
        self.first_tokens()

    def order(self, count: int, draw: random.Random) -> list[array[int]]:
        """Documents of the library in an unused order, if there is one. Equal draws give equal orders."""
        key = (count, draw.random())
        if key not in self._orders:
            known = {order for (other, _), order in self._orders.items() if other == count}
            drawn = tuple(draw.sample(range(count), count))
            while drawn in known and len(known) < math.factorial(count):
                drawn = tuple(draw.sample(range(count), count))
            self._orders[key] = drawn
        return [self._library[i] for i in self._orders[key]]

    def ask(self, prompt: TokenizedPrompt, asked: ReuseParams | None, output: int) -> None:
        """Add a request."""
        ask = None if asked is None else self._planner.plan(prompt, asked).ask
        self.add(prompt.tokens, output, ask)

    def first(self, count: int, way: str, asked: ReuseParams | None, draw: random.Random) -> dict[str, float]:
        """Seconds to the first token of a prompt with `count` documents, and its rows x layers.

        Full prefill has new documents. The system prompt is always cached.
        """
        order = self.order(count, draw)
        # Other measurements may have evicted some.
        self.encode(self.prompt(order), "pie" if asked is None else asked.method)
        prompt = self.prompt([self.text(self.shape.length) for _ in order] if way == FULL else order)
        before = self.core.totals()
        self.ask(prompt, asked, 1)
        seconds = self.first_tokens()
        counted = {name: self.core.totals()[name] - before[name] for name in ("row_layers", "encoded_documents")}
        assert counted["encoded_documents"] <= (asked is not None and asked.method == "full"), "the cache is too small"
        formula = row_layers(asked, prompt, self.core.info.page_size, self.core.executor.spec.num_layers)
        self.abort_all()
        return {"ttft": seconds, "row_layers": counted["row_layers"], "formula": formula}

    def closed_loop(
        self, count: int, asked: ReuseParams | None, clients: int, requests: int, output: int, draw: random.Random
    ) -> float:
        """Requests per second of clients that each ask again after their answer."""
        left = requests
        started = time.perf_counter()
        while self.core.busy or left:
            while left and len(self.core.requests) < clients:
                self.ask(self.prompt(self.order(count, draw)), asked, output)
                left -= 1
            self.events()
        return requests / (time.perf_counter() - started)

    def pages(self, asked: ReuseParams | None, readers: int) -> int:
        """The number of pages held by `readers` running requests with the same document and different questions."""
        for _ in range(readers):
            self.ask(self.prompt(self._library[:1]), asked, 16 * readers)
        self.first_tokens()
        state = self.core.state()
        assert state["running"] == readers, "the first ones ended before the last ones ran"
        self.abort_all()
        return int(state["pages_locked"] + state["pages_private"])

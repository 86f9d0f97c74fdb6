"""Requests on an engine core that import prompt modules, or have the modules' tokens as text."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from loadgen.offline.drive import Drive
from runtime.asks import EntryAsk, ModulesAsk

FULL, OTHER, SAME = "full prefill", "prefix caching, another order", "prefix caching, the same order"


def imports(percent: int) -> str:
    """The name, for tables, of importing modules with arguments."""
    return f"modules, {percent} % arguments"


class Modules(Drive):
    """An engine core with modules that are all cached.

    Args:
        path: the model's directory.
        modules: of a prompt.
        new: tokens of new text behind them.
        steps: decode steps behind the first token.
        options: as of `ramet serve`.
    """

    def __init__(self, path: Path, modules: int, new: int, steps: int, **options: Any):
        self._count_of, self._new, self._steps = modules, new, steps
        super().__init__(path, **options)
        self._texts: dict[tuple[str, int], list[array[int]]] = {}

    def first(self, length: int, way: str, draw: random.Random) -> dict[str, float]:
        """Seconds to the first token and of a decode step, and cached tokens; modules have `length` tokens together."""
        before = self.core.counters["cached_tokens"]
        self._asking(length, way, draw)()
        ttft = self.first_tokens()
        steps = self.finish()
        return {"ttft": ttft, "step": median(steps), "cached": self.core.counters["cached_tokens"] - before}

    def _asking(self, length: int, way: str, draw: random.Random) -> Callable[[], None]:
        modules = self._modules(way, length)
        if way == FULL:
            modules = [self.text(len(one)) for one in modules]
        elif way == OTHER:
            modules = draw.sample(modules, len(modules))
        elif way != SAME:
            return partial(self.add_modules, modules, 1 + self._steps, int(way.split()[1]))
        return lambda: self.add(sum(modules, array("i")) + self.text(self._new), 1 + self._steps)

    def _modules(self, way: str, length: int) -> list[array[int]]:
        """Texts of about equal length, which is not a multiple of the page size."""
        if (way, length) not in self._texts:
            count = self._count_of
            cuts = [0, *(length * i // count + 5 * i % 16 for i in range(1, count)), length]
            self._texts[way, length] = [self.text(stop - start) for start, stop in pairwise(cuts)]
        return self._texts[way, length]

    def add_modules(self, modules: Sequence[array[int]], output: int, percent: int = 0) -> None:
        """Add a request that imports modules in any order; `percent` of the tokens of each are an argument."""
        entries, own, anchors, at = [], array("i"), [], 0
        for one in modules:
            hole = len(one) * percent // 100
            holes = [(len(one) // 2, len(one) // 2 + hole)] if hole else []
            entries.append(EntryAsk(one.tobytes(), [(0, at)], holes, f"/{at}"))
            if hole:
                anchors.append((len(own), at + len(one) // 2))
                own += self.text(hole)
            at += len(one)
        anchors.append((len(own), at))
        own += self.text(self._new)
        self.add(own, output, ModulesAsk(self._draw.sample(entries, len(entries)), anchors))

    def together(self, length: int, requests: int, is_imported: bool) -> dict[str, float]:
        """Seconds of a decode step of requests that share modules or a prefix, and the pages in use."""
        modules = self._modules("together", length)
        for _ in range(requests):
            if is_imported:
                self.add_modules(modules, 1 + self._steps)
            else:
                self.add(sum(modules, array("i")) + self.text(self._new), 1 + self._steps)
        self.first_tokens()
        state = self.core.state()
        step = median(self.finish())
        return {"step": step, "rate": requests / step, "pages": state["pages_locked"] + state["pages_private"]}

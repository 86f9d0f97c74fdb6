"""Forces chains of thought on an engine core, with and without shared pages."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadgen.experiments.accuracy.chains import Chain
from loadgen.offline.drive import Drive
from loadgen.offline.forced import Forcing
from runtime.features.reasoning.ask import ReasoningAsk, ReasoningReport
from runtime.features.reasoning.background import Background
from runtime.features.reasoning.reservoir import WARM_UP
from runtime.features.reasoning.strategy import ReasonCache
from runtime.models.tokenizer import Tokenizer

# Forced tokens of a warm-up chain that are decoded, so that pages found in the first step are shared before the end.
_LAST = 4
# Number of greedy tokens that must contain the answer.
_SAID = 8
_BATCH = 4


@dataclass(frozen=True, slots=True)
class Task:
    """A chain as tokens: the prompt, and the forced tokens behind it. The last forced tokens lead to the answer."""

    prompt: array[int]
    forced: list[int]
    answer: str

    @classmethod
    def of(cls, chain: Chain, tokenizer: Tokenizer, length: int) -> Task:
        """The task of a chain. A chain longer than `length` tokens is cut and has no answer."""
        text = tokenizer.apply_chat_template([{"role": "user", "content": chain.question}])
        prompt, thought, lead = (
            tokenizer.encode(part, add_special_tokens=False) for part in (text, chain.thought, chain.lead)
        )
        forced = thought + lead
        is_whole = len(forced) <= length and chain.answer
        return cls(array("i", prompt), forced[:length], chain.answer if is_whole else "")


class Thinker(Drive):
    """An engine core that is forced to write chains.

    Args:
        path: the model's directory.
        at_once: compare reasoning steps within the engine's step, so that runs are equal, and not in a thread.
        options: options as of `ramet serve`.
    """

    def __init__(self, path: Path, at_once: bool, **options: Any):
        super().__init__(path, overlap="off", **options)
        self.tokenizer = Tokenizer.load(path)
        self._forcing = self.core.decoding = Forcing(self.core.decoding, _ignore)
        strategy = self.core.strategies[ReasonCache.name]
        assert isinstance(strategy, ReasonCache)
        self.strategy = strategy
        if at_once:
            strategy.background = Background(_AtOnce(), count(step=1000).__next__)

    def _ask(self, task: Task, ask: ReasoningAsk | None, more: int = 0) -> str:
        """Add a request that writes `more` tokens behind the forced ones; returns its id."""
        rid = f"{self._count + 1}"
        self._forcing.answers[rid] = task.forced
        self.add(task.prompt, len(task.forced) + more, ask)
        return rid

    def _clear(self) -> None:
        self.end()
        self._forcing.answers.clear()
        self._forcing.watch = _ignore

    def warm_up(self, tasks: Iterator[Task], ask: ReasoningAsk, batches: int) -> None:
        """Fill the reservoir of distances. Before it is full, no pages are shared by percentile.

        All but the last tokens of a chain are computed at once, as for a retracted request. Texts without similar
        steps never fill the reservoir.
        """
        for _ in range(batches):
            batch = list(islice(tasks, _BATCH))
            if not batch or len(self.strategy.reservoir) >= WARM_UP:
                return
            self._clear()
            for task in batch:
                self.core.requests[self._ask(task, ask)].tokens.extend(task.forced[:-_LAST])
            while self.core.busy:
                self.events()
            self.strategy.background.wait()

    def serve(self, tasks: Sequence[Task], ask: ReasoningAsk | None) -> dict[str, Any]:
        """Figures of serving chains that all come at once. `ask`: None: exact."""
        self._clear()
        return self._measure([self._ask(task, ask) for task in tasks])[0]

    def sample(
        self, prompts: Sequence[array[int]], ask: ReasoningAsk | None, output: int, **sampling: Any
    ) -> tuple[dict[str, Any], list[str]]:
        """Figures of answers that the model writes itself, all asked for at once, and their texts.

        Args:
            prompts: one for each answer; the answer's number is its seed.
            output: most tokens in an answer.
            sampling: further sampling parameters.
        """
        self._clear()
        rids = []
        for seed, prompt in enumerate(prompts):
            self.add(prompt, output, ask, {"ignore_eos": False, "seed": seed, **sampling})
            rids.append(f"{self._count}")
        figures, said = self._measure(rids)
        return figures, [self.tokenizer.decode(said[rid].tolist()) for rid in rids]

    def _measure(self, rids: Sequence[str]) -> tuple[dict[str, Any], dict[str, array[int]]]:
        """Run requests that were added to their end: figures, and tokens by request."""
        ended, said = dict.fromkeys(rids, 0.0), {rid: array("i") for rid in rids}
        strategy, scheduler = self.strategy, self.core.scheduler
        retracted, evaluated = scheduler.num_retracted, strategy.background.seconds
        steps: list[tuple[float, int, float]] = []
        decoding: list[float] = []
        started, cpu = time.perf_counter(), time.process_time()
        while self.core.busy:
            before, prefilled = time.perf_counter(), self.core.counters["prefill_tokens"]
            events = self.events()
            steps.append((time.perf_counter() - before, *self._pages()))
            if self.core.counters["prefill_tokens"] == prefilled:
                decoding.append(steps[-1][0])
            for event in events:
                said[event.rid].extend(event.tokens)
            ended |= {event.rid: event.reuse.amsr for event in events if isinstance(event.reuse, ReasoningReport)}
        strategy.background.wait()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        spent = np.array(steps)
        running, saved = (np.average(spent[:, column], weights=spent[:, 0]) for column in (1, 2))
        figures = {
            "rate": sum(map(len, said.values())) / seconds,
            "running": float(running),
            "retracted": scheduler.num_retracted - retracted,
            "amsr": float(saved),
            "peak": float(spent[:, 2].max()),
            "ended": float(np.mean(list(ended.values()))),
            "evaluation": (strategy.background.seconds - evaluated) / cpu,
            "step": decoding,
        }
        return figures, said

    def _pages(self) -> tuple[int, float]:
        """The number of running requests, and the share of saved pages in their page tables (AMSR)."""
        running = self.core.scheduler.running
        pages = [[*request.sequence.pages, *(p for s in request.segments for p in s.pages)] for request in running]
        saved = sum(len(mine) - len(set(mine)) for mine in pages)
        return len(running), saved / max(sum(map(len, pages)), 1)

    def predict(
        self, tasks: Sequence[Task], ask: ReasoningAsk | None, watch: Callable[[int, int, torch.Tensor], None]
    ) -> list[dict[str, Any]]:
        """Force all tasks, then let them answer. For each: the AMSR and, if it has an answer, whether it was right.

        `watch` is called with the task's number, the token's number and the logits.
        """
        self._clear()
        places = {self._ask(task, ask, _SAID if task.answer else 0): place for place, task in enumerate(tasks)}
        self._forcing.watch = lambda rid, number, logits: watch(places[rid], number, logits)
        found: list[dict[str, Any]] = [{"amsr": 0.0} for _ in tasks]
        said = [array("i") for _ in tasks]
        while self.core.busy:
            for event in self.events():
                said[places[event.rid]].extend(event.tokens)
                if isinstance(event.reuse, ReasoningReport):
                    found[places[event.rid]]["amsr"] = event.reuse.amsr
        for mine, task, tokens in zip(found, tasks, said, strict=True):
            if task.answer:
                text = self.tokenizer.decode(tokens[len(task.forced) :].tolist())
                mine["right"] = float(re.search(rf"\b{re.escape(task.answer)}\b", text) is not None)
        return found


def _ignore(rid: object, number: int, logits: torch.Tensor) -> None:
    """A `watch` that ignores the logits."""


class _AtOnce(Executor):
    """An executor that runs each call at once in the caller's thread."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        ended: Future[Any] = Future()
        ended.set_result(call(*args, **options))
        return ended


class Comparison:
    """Compares predictions with those of exact decoding, which are kept for the latest chains."""

    def __init__(self, thinker: Thinker):
        self._thinker = thinker
        self._tasks: list[Task] = []
        self._exact: dict[tuple[int, int], torch.Tensor] = {}

    def compare(self, tasks: list[Task], ask: ReasoningAsk | None) -> dict[str, list[float]]:
        """Figures with a value for each chain; `ask` None: exact decoding itself.

        KL is the distance in nats to exact decoding's predictions, as a mean over a chain's tokens.
        """
        if tasks != self._tasks:
            self._tasks, self._exact = tasks, {}
            self._predict(None, self._exact)
        mine: dict[tuple[int, int], torch.Tensor] = {}
        found = self._predict(ask, mine)
        figures: dict[str, list[float]] = {"amsr": [one["amsr"] for one in found], "kl": [], "agrees": [], "nll": []}
        figures["right"] = [one["right"] for one in found if "right" in one]
        for place, task in enumerate(tasks):
            numbers = range(len(task.forced))
            pairs = [(self._exact[place, number], mine[place, number]) for number in numbers]
            figures["kl"].append(float(np.mean([float((a.exp() * (a - b)).sum().clamp_min(0)) for a, b in pairs])))
            figures["agrees"].append(float(np.mean([bool(a.argmax() == b.argmax()) for a, b in pairs])))
            figures["nll"].append(float(np.mean([-float(mine[place, n][task.forced[n]]) for n in numbers])))
        return figures

    def _predict(self, ask: ReasoningAsk | None, seen: dict[tuple[int, int], torch.Tensor]) -> list[dict[str, Any]]:
        def note(place: int, number: int, logits: torch.Tensor) -> None:
            seen.setdefault((place, number), logits.log_softmax(-1))

        return self._thinker.predict(self._tasks, ask, note)

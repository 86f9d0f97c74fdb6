"""Chains of thought on an engine core: throughput, pages and predictions, with and without shared pages."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadgen.accuracy.chains import Chain
from loadgen.accuracy.forced import Forcing
from loadgen.micro.drive import Drive
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReasoningParams, SamplingParams
from runtime.protocol import AddRequest
from runtime.reuse.reasoning.background import Background
from runtime.reuse.reasoning.formal import agree
from runtime.reuse.reasoning.reservoir import Reservoir
from runtime.reuse.reasoning.steps import Splitter, Step, similarity, threshold
from runtime.reuse.reasoning.strategy import ReasonCache

Watch = Callable[[int, int, torch.Tensor], None]

# Tokens that `recall` decodes, so that what is found in the first step is shared before the end.
_LAST = 4
# Greedy tokens in which the answer must stand.
_SAID = 8
# Cosine above which the paper counts two steps as similar.
_SIMILAR = 0.8


@dataclass(frozen=True, slots=True)
class Task:
    """A chain in tokens: a prompt, and what is forced behind it, of which the last tokens lead to the answer."""

    prompt: array[int]
    forced: list[int]
    answer: str

    @classmethod
    def of(cls, chain: Chain, tokenizer: Tokenizer, length: int) -> Task:
        """`length`: most forced tokens; a chain that is longer has no answer."""
        text = tokenizer.apply_chat_template([{"role": "user", "content": chain.question}])
        prompt, thought, lead = (
            tokenizer.encode(part, add_special_tokens=False) for part in (text, chain.thought, chain.lead)
        )
        forced = thought + lead
        is_whole = len(forced) <= length and chain.answer
        return cls(array("i", prompt), forced[:length], chain.answer if is_whole else "")


@dataclass(slots=True)
class Served:
    """A batch of requests from the first to the last.

    Attributes:
        seconds, cpu_s, evaluation_s: wall time, CPU time of the process, and the share of that for evaluation.
        running: requests that ran in each step, weighted by the step's time; `retracted`: how often one gave way.
        saved: AMSR of what was in the pool, weighted by time; `peak`: the largest.
        ended: AMSR of each request at its end.
        step_ms: median and 99th percentile of the steps without a prompt.
    """

    tokens: int
    seconds: float
    cpu_s: float
    evaluation_s: float
    running: float
    retracted: int
    saved: float
    peak: float
    ended: list[float]
    step_ms: list[float]


@dataclass(slots=True)
class Compared:
    """A chain that was served in one way, beside exact decoding.

    Attributes:
        kl: nats, of exact decoding's predictions to these, for each forced token; `agrees`: likely tokens are the same.
        nll: nats, of the forced tokens, mean.
        right: whether the answer was; None: nothing was asked.
        amsr: at the end.
    """

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    nll: float = 0.0
    right: bool | None = None
    amsr: float = 0.0


class Thinker(Drive):
    """An engine core on which chains are forced.

    Args:
        path: the model's directory.
        at_once: steps are compared within the engine's step, so that a run repeats; else beside it, as when serving.
        options: as of `ramet serve`.
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

    def distances(self) -> dict[str, list[float]]:
        """The reservoirs, by rotation."""
        return {name: list(reservoir.latest) for name, reservoir in self.strategy.reservoirs.items()}

    def fill(self, distances: dict[str, list[float]]) -> None:
        """Go on with the reservoirs of another run."""
        for name, known in distances.items():
            self.strategy.reservoirs[name] = reservoir = Reservoir()
            for distance in known:
                reservoir.add(distance)

    def _ask(self, task: Task, reuse: dict[str, Any] | None, more: int = 0) -> str:
        """Add a request that goes on for `more` tokens behind the forced ones; its id."""
        rid = f"{self._count + 1}"
        self._forcing.answers[rid] = task.forced
        self.add(task.prompt, len(task.forced) + more, reuse)
        return rid

    def serve(self, tasks: Sequence[Task], reuse: dict[str, Any] | None) -> Serving:
        """Let all come at once; `reuse`: fields of their messages, None: exact."""
        self._clear()
        return Serving(self, tasks, [self._ask(task, reuse) for task in tasks])

    def pages(self) -> tuple[int, float]:
        """Requests that run, and the share of their pages that is saved, by their page tables."""
        running = self.core.scheduler.running
        pages = [[*request.sequence.pages, *(p for s in request.segments for p in s.pages)] for request in running]
        saved = sum(len(mine) - len(set(mine)) for mine in pages)
        return len(running), saved / max(sum(map(len, pages)), 1)

    def _clear(self) -> None:
        self.end()
        self._forcing.answers.clear()
        self._forcing.watch = _ignore

    def predict(
        self, tasks: Sequence[Task], reuse: dict[str, Any] | None, watch: Watch | None = None
    ) -> list[Compared]:
        """Force all, then let them answer; `watch`: called with the task's and the token's number, and the logits."""
        self._clear()
        places = {self._ask(task, reuse, _SAID if task.answer else 0): place for place, task in enumerate(tasks)}
        if watch is not None:
            self._forcing.watch = lambda rid, number, logits: watch(places[rid], number, logits)
        found, said = [Compared() for _ in tasks], [array("i") for _ in tasks]
        while self.core.busy:
            for event in self.core.step():
                assert event.finish is None or event.finish.type != "error", event.finish
                said[places[event.rid]].extend(event.tokens)
                if event.reuse:
                    found[places[event.rid]].amsr = event.reuse["amsr"]
        for mine, task, tokens in zip(found, tasks, said, strict=True):
            if task.answer:
                text = self.tokenizer.decode(tokens[len(task.forced) :].tolist())
                mine.right = re.search(rf"\b{re.escape(task.answer)}\b", text) is not None
        return found

    def recall(self, tasks: Sequence[Task], reuse: dict[str, Any] | None) -> list[float]:
        """AMSR of each, where all but the last tokens are computed at once, as those of a request that gave way are."""
        self._clear()
        ended = {self._ask(task, reuse): 0.0 for task in tasks}
        for rid, task in zip(ended, tasks, strict=True):
            self.core.requests[rid].tokens.extend(task.forced[:-_LAST])
        while self.core.busy:
            ended |= {event.rid: event.reuse["amsr"] for event in self.core.step() if event.reuse}
        self.strategy.background.wait()
        return list(ended.values())

    def think(self, questions: Sequence[str], length: int, temperature: float, seed: int) -> list[Chain]:
        """Chains that the model itself writes, all of them `length` tokens long."""
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=length, min_new_tokens=length, ignore_eos=False, seed=seed
        )
        said: dict[str, array[int]] = {}
        for question in questions:
            self._count += 1
            said[f"{self._count}"] = array("i")
            prompt = Task.of(Chain(question, ""), self.tokenizer, 0).prompt
            self.core.handle(AddRequest(f"{self._count}", prompt.tobytes(), sampling.model_dump()))
        while self.core.busy:
            for event in self.core.step():
                said[event.rid].extend(event.tokens)
        texts = [self.tokenizer.decode(tokens.tolist()) for tokens in said.values()]
        return [Chain(question, text) for question, text in zip(questions, texts, strict=True)]


class Serving:
    """A batch of requests that is served piece by piece, so that several ways can take turns on one machine."""

    def __init__(self, thinker: Thinker, tasks: Sequence[Task], rids: Sequence[str]):
        self._thinker, self._core = thinker, thinker.core
        self._tokens = sum(len(task.forced) for task in tasks)
        self._ended = dict.fromkeys(rids, 0.0)
        self._steps: list[tuple[float, int, float]] = []
        self._decoding: list[float] = []
        self._seconds = self._cpu_s = 0.0
        self._retracted, self._evaluation_s = self._counts()

    def _counts(self) -> tuple[int, float]:
        return self._core.scheduler.num_retracted, self._thinker.strategy.background.seconds

    def go_on(self, steps: int = 32) -> bool:
        """Run some steps, and wait for the evaluations behind them; False if there is nothing left to do."""
        started, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            if self._core.busy:
                self._step()
        self._thinker.strategy.background.wait()
        self._seconds += time.perf_counter() - started
        self._cpu_s += time.process_time() - cpu_s
        return self._core.busy

    def _step(self) -> None:
        before, prefilled = time.perf_counter(), self._core.counters["prefill_tokens"]
        events = self._core.step()
        self._steps.append((time.perf_counter() - before, *self._thinker.pages()))
        if self._core.counters["prefill_tokens"] == prefilled:
            self._decoding.append(1e3 * self._steps[-1][0])
        self._ended |= {event.rid: event.reuse["amsr"] for event in events if event.reuse}

    def served(self) -> Served:
        retracted, evaluation_s = self._counts()
        stepping = sum(spent for spent, _, _ in self._steps)
        return Served(
            self._tokens,
            self._seconds,
            self._cpu_s,
            evaluation_s - self._evaluation_s,
            sum(spent * running for spent, running, _ in self._steps) / stepping,
            retracted - self._retracted,
            sum(spent * saved for spent, _, saved in self._steps) / stepping,
            max(saved for _, _, saved in self._steps),
            list(self._ended.values()),
            [float(value) for value in np.percentile(self._decoding, (50, 99))],
        )


def _ignore(rid: object, number: int, logits: torch.Tensor) -> None:
    """Look at no logits."""


class _AtOnce(Executor):
    """Runs calls where they are made."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        ended: Future[Any] = Future()
        ended.set_result(call(*args, **options))
        return ended


def compare(
    thinker: Thinker, ways: dict[str, dict[str, Any] | None], tasks: Sequence[Task]
) -> dict[str, list[Compared]]:
    """The same chains in all ways, by way; exact decoding is the first, and the others are compared with it."""
    full: dict[tuple[int, int], torch.Tensor] = {}
    found: dict[str, list[Compared]] = {}
    for name, reuse in ways.items():
        seen = [Compared() for _ in tasks]

        def note(place: int, number: int, logits: torch.Tensor, seen: list[Compared] = seen) -> None:
            mine = logits.log_softmax(-1)
            true = full.setdefault((place, number), mine)
            seen[place].kl.append(round(max(float((true.exp() * (true - mine)).sum()), 0.0), 7))
            seen[place].agrees.append(bool(true.argmax() == mine.argmax()))
            seen[place].nll -= float(mine[tasks[place].forced[number]]) / len(tasks[place].forced)

        found[name] = thinker.predict(tasks, reuse, note)
        for mine, noted in zip(found[name], seen, strict=True):
            mine.kl, mine.agrees, mine.nll = noted.kl, noted.agrees, noted.nll
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """The nature of a text; means over its chains.

    Attributes:
        similar: steps with a cosine above 0.8 to an earlier one, the paper's similarity ratio.
        again: steps that were said before word by word.
        by_words, by_both: pages with candidates behind the filter of words, and behind that of formal language, too.
    """

    chains: int
    tokens: float
    steps: float
    similar: float
    again: float
    by_words: float
    by_both: float

    @classmethod
    def of(cls, tasks: Sequence[Task], tokenizer: Tokenizer, page_size: int) -> Kind:
        steps = [_steps(task, tokenizer) for task in tasks]
        later = [(step, mine[:number]) for mine in steps for number, step in enumerate(mine) if number]
        similar = [any(_cosine(step, one) > _SIMILAR for one in before) for step, before in later]
        again = [any(step.text == one.text for one in before) for step, before in later]
        pages = sum(-(-(len(task.prompt) + len(task.forced)) // page_size) for task in tasks)
        shared = np.sum([_candidates(task, mine, page_size) for task, mine in zip(tasks, steps, strict=True)], 0)
        return cls(
            len(tasks),
            sum(len(task.forced) for task in tasks) / len(tasks),
            sum(map(len, steps)) / len(tasks),
            sum(similar) / max(len(similar), 1),
            sum(again) / max(len(again), 1),
            *(shared / pages).tolist(),
        )


def _steps(task: Task, tokenizer: Tokenizer) -> list[Step]:
    splitter = Splitter()
    found = [splitter.push(token, tokenizer.token_text(token)) for token in task.forced]
    return [step for step in found if step is not None]


def _candidates(task: Task, steps: Sequence[Step], page_size: int) -> tuple[int, int]:
    """Pages with a candidate by the default thresholds: behind the filter of words, and behind both filters."""

    def pages(step: Step) -> int:
        first, stop = len(task.prompt) + step.start, len(task.prompt) + step.end
        return max(stop // page_size - -(-first // page_size), 0)

    found, params = [0, 0], ReasoningParams()
    for number, step in enumerate(steps):
        scores = [similarity(step, one) for one in steps[:number]]
        least = threshold(scores, params.tau_max, params.tau_min)
        alike = [one for one, score in zip(steps, scores, strict=False) if score > least]
        equal = [one for one in alike if agree(step.formal_text, one.formal_text)]
        for place, kept in enumerate((alike, equal)):
            longest = max(map(pages, kept), default=0)
            found[place] += min(pages(step), longest + 1) if longest else 0
    return found[0], found[1]


def _cosine(a: Step, b: Step) -> float:
    lengths = sorted((len(a.text), len(b.text)))
    return similarity(a, b) * lengths[1] / lengths[0]

"""One group of requests under one case: answers, time and rows, kept in a file so that a run can go on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.accuracy.cases import Case
from loadgen.accuracy.tasks import Example, Source
from runtime.frontend.output import Submission
from runtime.params import DiffusionParams, SamplingParams

if TYPE_CHECKING:
    from runtime.engine.offline import Engine

_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """Which requests: a task at a ratio r = prefix / (prompt + canvas)."""

    task: str
    room: int
    ratio: float

    def group(self, source: Source, number: int, questions: int) -> list[Example]:
        """Requests that share a prefix of the length that makes the ratio; a longer one where the task needs it."""
        probe = source.group(self.task, number, self.room, questions)[0]
        rest = len(probe.suffix) + self.room
        prefix = round(rest * self.ratio / (1 - self.ratio))
        return source.group(self.task, number, self.room, questions, prefix)


@dataclass(slots=True)
class Outcome:
    """What came of a group.

    Attributes:
        answers: requests; `exact`: those whose answer is right to the token, up to its end.
        tokens: tokens of the right answers with their ends; `right`: those that stand where they should.
        generated: tokens that were denoised, and `seconds` for it, one request after the other.
        rows: forward rows: rows that ran through a layer, over layers; an encoding of the prefix is not in it.
        depth: layers that were reused.
        ratio: the prefix's share, over the group's requests.
    """

    answers: int = 0
    exact: int = 0
    tokens: int = 0
    right: int = 0
    generated: int = 0
    seconds: float = 0.0
    rows: float = 0.0
    depth: int = 0
    ratio: float = 0.0

    @classmethod
    def total(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """All of them together."""
        whole = cls()
        for outcome in outcomes:
            whole.add(outcome)
        return whole

    def add(self, other: Outcome) -> None:
        """Put groups together."""
        for name in ("answers", "exact", "tokens", "right", "generated", "seconds", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.depth, self.ratio = other.depth, other.ratio


class Runner:
    """Runs groups on an engine, one request at a time; the prefix is encoded before a group's clock starts."""

    def __init__(self, engine: Engine, end: int):
        self._engine = engine
        self._end = end
        assert engine.info.diffusion is not None
        self._layers = engine.info.diffusion.num_layers

    def run(self, case: Case, examples: list[Example]) -> Outcome:
        """What a case makes of a group."""
        prefix = len(examples[0].prefix)
        params = case.params(prefix)
        if case.is_reusing:
            short = params.model_copy(update={"gen_length": 1, "block_length": 1, "steps": 1})
            self._generate(examples[0], short)
        out = Outcome()
        before = self._engine.state()["row_layers"]
        for example in examples:
            self._ask(example, params, out)
        out.rows = (self._engine.state()["row_layers"] - before) / self._layers
        return out

    def _ask(self, example: Example, params: DiffusionParams, out: Outcome) -> None:
        start = time.perf_counter()
        tokens, reuse = self._generate(example, params)
        out.seconds += time.perf_counter() - start
        wanted = example.answer[: example.answer.index(self._end) + 1]
        right = sum(a == b for a, b in zip(tokens, wanted, strict=False))
        out.answers += 1
        out.exact += right == len(wanted)
        out.tokens += len(wanted)
        out.right += right
        out.generated += len(tokens)
        out.depth, out.ratio = reuse["shallow_depth"], len(example.prefix) / len(example.ids)

    def _generate(self, example: Example, params: DiffusionParams) -> tuple[list[int], dict[str, Any]]:
        submission = Submission(example.prefix + example.suffix, _GREEDY, diffusion=params)
        *_, last = self._engine.stream_all([submission])
        return last.token_ids, last.reuse or {}


class Records:
    """Outcomes by what made them, in a JSONL file: what stands there is not run again."""

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a run was ended while it wrote
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            record = json.loads(line)
            self._outcomes[_key(record["of"])] = Outcome(**record["outcome"])

    def get(self, of: dict[str, Any]) -> Outcome | None:
        """The outcome, if it is there."""
        return self._outcomes.get(_key(of))

    def put(self, of: dict[str, Any], outcome: Outcome) -> None:
        """Keep it."""
        self._outcomes[_key(of)] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"of": of, "outcome": asdict(outcome)}) + "\n")


def _key(of: dict[str, Any]) -> str:
    return json.dumps(of, sort_keys=True)

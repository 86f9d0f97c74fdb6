"""`ramet profile --answers`: right answers and times of document methods on a user's questions."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from loadgen.harness import Results
from loadgen.harness.plots import drawing
from loadgen.harness.statistics import Estimate, estimate, shown
from loadgen.offline.document_methods import name_of, ways
from loadgen.offline.forced import Ask, Asker
from loadgen.offline.profile.depths import open_results
from loadgen.offline.profile.questions import AnsweredQuestion, draw, read_questions
from loadgen.offline.profile.settings import AnswerSettings, ProfileFiles
from runtime.asks import ReuseParams
from runtime.config import Config
from runtime.errors import ModelError
from runtime.features.chunks.documents.plan import DocumentPlanner, plan_encoding
from runtime.features.chunks.documents.prompt import LEAD_ID
from runtime.features.chunks.documents.table import MOST_LOST, MeasuredMethod, choose, lead_id
from runtime.models.resolve import resolve_model
from runtime.models.spec import DecoderSpec
from runtime.models.tokenizer import Tokenizer

_FULL = "full prefill"
Figures = dict[str, float]


class AnswerProfiler:
    """Asks questions by full prefill and by all methods, and records each answer."""

    def __init__(self, asker: Asker, tokenizer: Tokenizer, settings: AnswerSettings, results: Results):
        self._asker, self._tokenizer, self._settings, self._results = asker, tokenizer, settings, results
        self.grid: dict[str, ReuseParams] = ways(
            settings.methods, [ratio / 100 for ratio in settings.ratios], ["token"]
        )

    def run(self, questions: list[AnsweredQuestion]) -> dict[str, list[Figures]]:
        """By way, the figures of each question; those that the results lack are measured. Raises ModelError."""
        names = [_FULL, *self.grid]
        with tqdm(total=len(questions) * len(names), desc="answers", unit="answer") as bar:
            for number, question in enumerate(questions):
                missing = [name for name in names if not self._results.has({"way": name}, number)]
                if missing:
                    for name, figures in self._measure(question, missing).items():
                        self._results.add({"way": name}, number, figures)
                bar.update(len(names))
        return {name: [self._results.of({"way": name})[i] for i in range(len(questions))] for name in names}

    def _measure(self, question: AnsweredQuestion, names: list[str]) -> dict[str, Figures]:
        """Seconds to the first token, with all documents cached but for full prefill, and whether answers are right."""
        prompt, planner = question.tokenize(self._tokenizer), DocumentPlanner()
        tokens = prompt.tokens.tolist()
        if len(tokens) + self._settings.output > (most := self._asker.core.info.context_length):
            raise ModelError(f"a prompt has {len(tokens)} tokens; the model's context is {most}")
        asks = {name: Ask(tokens, planner.plan(prompt, way).ask) for name, way in self.grid.items()} | {
            _FULL: Ask(tokens)
        }
        seconds = {_FULL: self._first(asks[_FULL])} if _FULL in names else {}
        for method in dict.fromkeys(way.method for way in self.grid.values()):
            self._first(Ask(tokens, plan_encoding(prompt, method).ask))
        seconds |= {name: self._first(asks[name]) for name in names if name != _FULL}
        # Their prompts are cached now, so that all of them are decoded together at little cost.
        said = self._asker.greedy([asks[name] for name in names], self._settings.output)
        self._asker.end()
        return {
            name: {"ttft": seconds[name], "right": question.is_right(self._tokenizer.decode(tokens))}
            for name, tokens in zip(names, said, strict=True)
        }

    def _first(self, ask: Ask) -> float:
        started = time.perf_counter()
        self._asker.greedy([ask], 1)
        return time.perf_counter() - started


def profile_answers(config: Config, settings: AnswerSettings, files: ProfileFiles) -> None:
    """Measure a model on a file of questions; write its table, print it, and draw it. Raises ModelError."""
    path = resolve_model(config.model)
    spec = DecoderSpec.load(path)
    if not spec.causal:
        raise ModelError(f"{spec.architecture} is a diffusion model, which serves no documents")
    every = read_questions(settings.answers)
    options = identity_of(spec.identity, settings)
    questions = draw(every, settings.samples, settings.documents, settings.seed)
    measured = files.out.with_name(files.out.name + ".answers")
    asker = Asker(path, **config.model.model_dump(exclude={"model"}))
    profiler = AnswerProfiler(asker, Tokenizer.load(path), settings, open_results(measured, options, settings.seed))
    try:
        found = profiler.run(questions)
    finally:
        asker.close()
    rows = [_row(asked, name, found) for name, asked in profiler.grid.items()]
    methods = [MeasuredMethod.model_validate(row) for row in rows]
    table = {"model": spec.identity, "settings": settings.model_dump(mode="json"), "measured": rows}
    files.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    _print(found)
    print(_advice(methods, found))
    if files.plot:
        _draw(found, files.plot)


def identity_of(model: dict[str, Any], settings: AnswerSettings) -> dict[str, Any]:
    """What an answer depends on, but for its way and its question's number: a run with more of either goes on."""
    digest = hashlib.sha256(settings.answers.read_bytes()).hexdigest()
    kept = settings.model_dump(exclude={"answers", "methods", "ratios", "samples"})
    return {"model": model, "questions": digest, "settings": kept, "lead": LEAD_ID}


def _values(found: Mapping[str, list[Figures]], name: str, figure: str) -> np.ndarray:
    return np.array([one[figure] for one in found[name]], dtype=float)


def _lost(found: Mapping[str, list[Figures]], name: str) -> Estimate:
    """The share of right answers that a method loses, question by question."""
    return estimate(_values(found, _FULL, "right") - _values(found, name, "right"), "mean")


def _share(found: Mapping[str, list[Figures]], name: str) -> Estimate:
    """The time to the first token as a share of full prefill's."""
    return estimate(_values(found, name, "ttft") / _values(found, _FULL, "ttft"))


def _row(asked: ReuseParams, name: str, found: Mapping[str, list[Figures]]) -> dict[str, Any]:
    """A row of the table, in the form of `runtime.features.chunks.documents.table.MeasuredMethod`."""
    lost = [round(one, 4) for one in _lost(found, name)]
    return {
        **asked.model_dump(exclude_none=True),
        "lead": lead_id(asked.method),
        "lost": lost[0],
        "lost_interval": lost[1:],
        "questions": len(found[name]),
        "cost": round(_share(found, name)[0], 4),
    }


def _print(found: Mapping[str, list[Figures]]) -> None:
    """Print all figures."""
    print(f"{'method':24}  {'right, %':8}  {'lost, points [95 %]':22}  time to the first token, of full prefill")
    for name in found:
        versus = (
            ("", "1") if name == _FULL else (shown(_lost(found, name), factor=100), shown(_share(found, name), ".3f"))
        )
        print(f"{name:24}  {100 * _values(found, name, 'right').mean():<18.1f}  {versus[0]:22}  {versus[1]}")


def _advice(methods: list[MeasuredMethod], found: Mapping[str, list[Figures]]) -> str:
    """The method that auto chooses by the table, or how many questions the choice still needs."""
    best = choose(methods)
    cheaper = [one for one in methods if one.lacking and (best is None or one.cost < best.cost)]
    undecided = min(cheaper, key=lambda one: ((one.lost or 0) > MOST_LOST, one.cost), default=None)
    more = (
        ""
        if undecided is None
        else f"about {undecided.lacking} more questions (--samples {undecided.questions + undecided.lacking})"
    )
    if best is not None:
        name = name_of(best)
        lost, share = shown(_lost(found, name), factor=100), shown(_share(found, name), ".2f")
        tried = f" To know whether {name_of(undecided)} keeps as many takes {more}." if undecided else ""
        return f"Use {name}: it loses {lost} points of right answers at {share} of full prefill's time.{tried}"
    if undecided is not None:
        return f"Too few questions: auto stays with full prefill. To know more takes {more}."
    return f"No method keeps right answers within {100 * MOST_LOST:g} points: use full prefill."


def _draw(found: Mapping[str, list[Figures]], path: Path) -> None:
    """Draw right answers, with intervals of what is lost, over the time to the first token."""
    full = 100 * _values(found, _FULL, "right").mean()
    with drawing(path, (7, 5)) as axes:
        axes.axhline(full, color="grey", linestyle="--", label=_FULL)
        for number, name in enumerate(name for name in found if name != _FULL):
            lost, low, high = (100 * one for one in _lost(found, name))
            x, errors = _share(found, name)[0], [[high - lost], [lost - low]]
            # Colours repeat after ten.
            axes.errorbar(x, full - lost, yerr=errors, fmt="os^"[number // 10 % 3], capsize=3, label=name)
        axes.set(xlabel="time to the first token, share of full prefill's", ylabel="right answers, %", ylim=(0, 100))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

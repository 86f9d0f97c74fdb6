"""`ramet bench reasoning`: chains of thought whose repeated steps share pages (ReasonCache), beside exact decoding."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from loadgen.accuracy.chains import WRITTEN, Chain, problems, read_chains
from loadgen.accuracy.reasoning import Kind, Task, Thinker, compare
from loadgen.accuracy.reasoning_report import PUBLISHED, plot, sections
from loadgen.accuracy.sections import show
from loadgen.http.files import write_json
from loadgen.micro.drive import model_path
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.reasoning.reservoir import WARM_UP

_ROTATIONS = ("stale", "moved")
_GENERATED = "generated"
_TEMPERATURE = 0.8
# Random sharing, to begin with: until it is known how many pages it saves.
_DRAWN = {"method": "reasoncache", "random_share": 0.3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--page-size", type=int, default=16, help="default: 16")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="measure throughput")
    parser.add_argument("--quality", action="store_true", help="also compare predictions and answers")
    parser.add_argument(
        "--texts", nargs="+", default=["worked", "alike"], metavar="TEXT",
        help=f"{', '.join((*WRITTEN, _GENERATED))}, or a JSONL file of chains; the first one serves for the throughput",
    )  # fmt: skip
    parser.add_argument("--length", type=int, default=800, help="tokens of a chain (default: 800)")
    parser.add_argument("--requests", type=int, default=16, help="that come at once (default: 16)")
    parser.add_argument("--room", type=int, default=3, help="requests that the small pool holds (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="of all ways, behind a warm-up (default: 5)")
    parser.add_argument("--percentile", type=float, default=80, help="of the throughput (default: 80)")
    parser.add_argument(
        "--percentiles", type=float, nargs="+", default=[20, 50, 80, 100], help="of the quality (default: 20 50 80 100)"
    )
    parser.add_argument("--chains", type=int, default=40, help="of each text in the quality (default: 40)")
    parser.add_argument("--batch", type=int, default=4, help="chains at a time in the quality (default: 4)")
    parser.add_argument(
        "--warm-up", type=int, default=40, metavar="BATCHES", help="most, to fill the reservoirs (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--merge", type=Path, metavar="JSON", help="of another run: parts that this one lacks")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot as PNG or SVG; it needs the quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round and chain")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write the files."""
    a = arguments
    found: dict[str, Any] = json.loads(a.merge.read_text("utf-8")) if a.merge else {}
    bench = Bench(a)
    if a.speed:
        found |= {"speed": bench.speed(), "settings": bench.settings()}
    if a.quality:
        for part, texts in bench.quality().items():
            found[part] = found.get(part, {}) | texts
    show(list(sections(found)), PUBLISHED, a.markdown)
    if a.plot and "quality" in found:
        plot(found, a.plot)
    if a.json:
        write_json(a.json, found)
    return 0


class Bench:
    """The measurements, by their options."""

    def __init__(self, arguments: argparse.Namespace):
        self.a = arguments
        self.path = model_path(self.a.model)
        self.tokenizer = Tokenizer.load(self.path)
        self._stocks: dict[str, Iterator[Chain]] = {}

    def settings(self) -> dict[str, Any]:
        """A run's options, for the tables."""
        names = ("page_size", "length", "requests", "room", "rounds", "percentile")
        return {**{name: getattr(self.a, name) for name in names}, "text": _name(self.a.texts[0])}

    def thinker(self, at_once: bool, pool_tokens: int) -> Thinker:
        a = self.a
        threads = {} if a.threads is None else {"threads": a.threads}
        running = max(a.requests, a.batch)
        options = {"dtype": a.dtype, "page_size": a.page_size, "max_running": running, **threads}
        return Thinker(self.path, at_once, pool_tokens=pool_tokens, **options)

    def tasks(self, text: str, count: int) -> list[Task]:
        """The next chains of a text; fewer where a file has fewer in all."""
        if text not in self._stocks:
            self._stocks[text] = self._chains(text, random.Random(f"{self.a.seed} {text}"))
        # Written chains end a little behind the wanted length, and are asked for an answer then.
        most = self.a.length * (2 if text in WRITTEN else 1)
        chains = list(dict.fromkeys(islice(self._stocks[text], count)))
        return [Task.of(chain, self.tokenizer, most) for chain in chains]

    def _chains(self, text: str, rng: random.Random) -> Iterator[Chain]:
        if text in WRITTEN:
            while True:
                yield WRITTEN[text](rng, self.a.length)
        if text != _GENERATED:
            recorded = read_chains(Path(text))
            yield from cycle(rng.sample(recorded, len(recorded)))
        asked = problems(rng)
        while True:
            questions = list(islice(asked, self.a.requests))
            thinker = self.thinker(False, self.a.requests * (self.a.length + 256))
            yield from thinker.think(questions, self.a.length, _TEMPERATURE, rng.randrange(1 << 31))
            thinker.close()

    def _fields(self, rotation: str, percentile: float) -> dict[str, Any]:
        return {"method": "reasoncache", "rotation": rotation, "percentile": percentile}

    # -- throughput ----------------------------------------------------------------------------------------------

    def speed(self) -> dict[str, Any]:
        """By pool and way, what each round gave, behind a warm-up; the ways take turns in being the first."""
        a, found = self.a, {}
        text = a.texts[0]
        batches = [self.tasks(text, a.requests) for _ in range(a.rounds)]
        most = max(len(task.prompt) + len(task.forced) for batch in batches for task in batch)
        pages = -(-most // a.page_size) + 1
        with Progress(console=Console(stderr=True)) as progress:
            for pool, held in {"small": a.room, "large": a.requests}.items():
                thinker = self.thinker(False, held * pages * a.page_size)
                drawn = self._warm_up(thinker, text, progress)
                ways: dict[str, dict[str, Any] | None] = {"exact": None}
                ways |= {rotation: self._fields(rotation, a.percentile) for rotation in _ROTATIONS}
                ways["random"] = drawn
                rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
                for number, batch in enumerate(progress.track(batches, description=f"{pool} pool")):
                    for name in _turned(list(ways), number):
                        rounds[name].append(asdict(thinker.serve(batch, ways[name])))
                    last = [rounds[name][-1]["ended"] for name in ("random", "stale")]
                    ways["random"] = drawn = _equal(drawn, *last)
                found[pool] = rounds
                thinker.close()
        return found

    # -- quality -------------------------------------------------------------------------------------------------

    def quality(self) -> dict[str, Any]:
        """By text and way, what each chain gave; and what the texts are like."""
        quality, kinds = {}, {}
        for text in self.a.texts:
            tasks = self.tasks(text, self.a.chains)
            kinds[_name(text)] = asdict(Kind.of(tasks, self.tokenizer))
            quality[_name(text)] = self._compare(text, tasks)
        return {"quality": quality, "texts": kinds}

    def _compare(self, text: str, tasks: list[Task]) -> dict[str, list[dict[str, Any]]]:
        a = self.a
        ways: dict[str, dict[str, Any] | None] = {"exact": None}
        for rotation in _ROTATIONS:
            ways |= {f"{rotation} {p:g}": self._fields(rotation, p) for p in a.percentiles}
        thinker = self.thinker(True, a.batch * (2 * a.length + 512))
        found: dict[str, list[dict[str, Any]]] = {}
        with Progress(console=Console(stderr=True)) as progress:
            ways["random"] = self._warm_up(thinker, text, progress)
            starts = range(0, len(tasks), a.batch)
            for start in progress.track(starts, description=_name(text)):
                for name, mine in compare(thinker, ways, tasks[start : start + a.batch]).items():
                    found.setdefault(name, []).extend(asdict(one) for one in mine)
        thinker.close()
        return found

    def _warm_up(self, thinker: Thinker, text: str, progress: Progress) -> dict[str, Any]:
        """Fill the reservoirs of distances; the options of as much random sharing as the paper's percentile gives.

        Texts without similar steps never fill them.
        """
        a = self.a
        stale, random_pages = [], []
        bar = progress.add_task(f"{_name(text)}, warm-up", total=WARM_UP)
        for left in reversed(range(a.warm_up)):
            batch = self.tasks(text, a.batch)
            before = thinker.measured("stale")
            rotations = {name: self._fields(name, a.percentile) for name in _ROTATIONS}
            found = {name: thinker.predict(batch, fields) for name, fields in rotations.items()}
            progress.update(bar, completed=thinker.measured("stale"))
            if before >= WARM_UP or not left:
                stale += [one.amsr for one in found["stale"]]
                random_pages += [one.amsr for one in thinker.predict(batch, _DRAWN)]
            if len(stale) >= a.batch:
                break
        return _equal(_DRAWN, random_pages, stale)


def _equal(drawn: dict[str, Any], found: list[float], wanted: list[float]) -> dict[str, Any]:
    """Options of random sharing that save as many pages as is wanted, after what they saved."""
    if not found or not fmean(found):
        return dict(_DRAWN)
    return drawn | {"random_share": min(drawn["random_share"] * fmean(wanted) / fmean(found), 1.0)}


def _turned(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _name(text: str) -> str:
    """For tables."""
    return Path(text).stem

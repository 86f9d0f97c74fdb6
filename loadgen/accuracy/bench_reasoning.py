"""`ramet bench reasoning`: chains of thought whose repeated steps share pages (ReasonCache), beside exact decoding."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from loadgen.accuracy.chains import WRITTEN, Chain, problems, read_chains
from loadgen.accuracy.reasoning import Kind, Served, Task, Thinker, compare
from loadgen.accuracy.reasoning_report import PUBLISHED, plot, sections
from loadgen.accuracy.sections import show
from loadgen.http.outputs import add_files, write_files
from loadgen.micro.drive import model_path
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.reasoning.reservoir import WARM_UP

_ROTATIONS = ("stale", "moved")
_TEMPERATURE = 0.8
_POOLS = ("large", "small")
_WAYS = (*_ROTATIONS, "random")
# Random sharing, to begin with: until it is known how many pages it saves.
_DRAWN = {"method": "reasoncache", "random_share": 0.3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--page-size", type=int, default=16, help="default: 16")
    parser.add_argument("--drafts", choices=("off", "auto"), default="off", help="in the throughput (default: off)")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="measure throughput")
    parser.add_argument("--quality", action="store_true", help="also compare predictions and answers")
    parser.add_argument(
        "--texts", nargs="+", default=["worked", "alike"], metavar="TEXT",
        help=f"{', '.join(WRITTEN)}, or a JSONL file of chains; the first one serves for the throughput",
    )  # fmt: skip
    parser.add_argument("--generate", type=Path, metavar="JSONL", help="only let the model write chains into a file")
    parser.add_argument("--length", type=int, default=800, help="tokens of a chain (default: 800)")
    parser.add_argument("--requests", type=int, default=16, help="that come at once (default: 16)")
    parser.add_argument("--room", type=float, default=3, help="requests that the small pool holds (default: 3)")
    parser.add_argument("--pools", nargs="+", choices=_POOLS, default=_POOLS, help="default: both")
    parser.add_argument(
        "--ways", nargs="*", choices=_WAYS, default=_WAYS, help="of the throughput, beside exact (default: all)"
    )
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
    parser.add_argument("--merge", type=Path, metavar="JSON", help="of another run, which this one goes on from")
    add_files(parser, "markdown", "plot", json="write all figures, as they come")


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    bench = Bench(a)
    if a.generate:
        bench.generate(a.generate)
        return 0
    if a.speed:
        bench.speed()
    else:
        bench.describe()
    if a.quality:
        bench.quality()
    write_files(a, bench.found, show(list(sections(bench.found)), PUBLISHED), partial(plot, bench.found))
    return 0


class Bench:
    """The measurements, by their options.

    Attributes:
        found: what was measured, as it is written.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.a = arguments
        self.path = model_path(self.a.model)
        self.tokenizer = Tokenizer.load(self.path)
        self.found: dict[str, Any] = json.loads(self.a.merge.read_text("utf-8")) if self.a.merge else {}
        if self.found.setdefault("page_size", self.a.page_size) != self.a.page_size:
            raise ValueError(f"{self.a.merge} was measured with pages of {self.found['page_size']}")

    def thinker(self, at_once: bool, pool_tokens: int, drafts: str = "off") -> Thinker:
        a = self.a
        threads = {} if a.threads is None else {"threads": a.threads}
        running = max(a.requests, a.batch)
        options = {"dtype": a.dtype, "page_size": a.page_size, "max_running": running, "drafts": drafts, **threads}
        return Thinker(self.path, at_once, pool_tokens=pool_tokens, **options)

    def tasks(self, text: str, purpose: str) -> Iterator[Task]:
        """Chains of a text, the same ones each time for a purpose; those of a file once each."""
        # Written chains end a little behind the wanted length, and are asked for an answer then.
        most = self.a.length * (2 if text in WRITTEN else 1)
        rng = random.Random(f"{self.a.seed} {text} {purpose}")
        for chain in self._chains(text, rng):
            yield Task.of(chain, self.tokenizer, most)

    def _chains(self, text: str, rng: random.Random) -> Iterator[Chain]:
        if text not in WRITTEN:
            recorded = read_chains(Path(text))
            yield from rng.sample(recorded, len(recorded))
            return
        while True:
            yield WRITTEN[text](rng, self.a.length)

    def generate(self, path: Path) -> None:
        """Let the model write its own chains."""
        a, rng = self.a, random.Random(self.a.seed)
        questions = list(islice(problems(rng), a.chains))
        thinker = self.thinker(False, a.chains * (a.length + 256))
        chains = thinker.think(questions, a.length, _TEMPERATURE, rng.randrange(1 << 31))
        thinker.close()
        path.write_text("".join(json.dumps(asdict(chain)) + "\n" for chain in chains), "utf-8")

    def _fields(self, rotation: str, percentile: float) -> dict[str, Any]:
        return {"method": "reasoncache", "rotation": rotation, "percentile": percentile}

    def describe(self) -> None:
        """Note the nature of the texts."""
        for text in self.a.texts:
            tasks = list(islice(self.tasks(text, "quality"), self.a.chains))
            kind = Kind.of(tasks, self.tokenizer, self.a.page_size)
            self.found.setdefault("texts", {})[_name(text)] = asdict(kind)
        write_files(self.a, self.found)

    # -- throughput ----------------------------------------------------------------------------------------------

    def speed(self) -> None:
        """By pool and way, what each round gave. In a round all ways take turns, an engine each."""
        a, text = self.a, self.a.texts[0]
        warm, found = self._warm(text), self.found.setdefault("speed", {})
        names = ("page_size", "length", "requests", "room", "percentile", "drafts")
        self.found["settings"] = {**{name: getattr(a, name) for name in names}, "text": _name(text)}
        chains = self.tasks(text, "throughput")
        batches = [list(islice(chains, a.requests)) for _ in range(max(a.rounds, 1))]
        longest = max(len(task.prompt) + len(task.forced) for task in batches[0])
        # Later batches may have somewhat longer ones.
        pages = -(-int(1.1 * longest) // a.page_size) + 1
        ways: dict[str, dict[str, Any] | None] = {"exact": None}
        ways |= {rotation: self._fields(rotation, a.percentile) for rotation in _ROTATIONS}
        ways["random"] = _DRAWN | {"random_share": warm["random_share"]}
        ways = {name: ways[name] for name in ("exact", *a.ways)}
        with Progress(console=Console(stderr=True)) as progress:
            for pool in a.pools:
                rounds: dict[str, list[dict[str, Any]]] = found.setdefault(pool, {name: [] for name in ways})
                done = len(rounds["exact"])
                held = a.room if pool == "small" else a.requests
                thinkers = {name: self.thinker(False, int(held * pages) * a.page_size, a.drafts) for name in ways}
                # The first evaluation loads the tokenizer.
                for name, thinker in thinkers.items():
                    thinker.recall(batches[0][:1], ways[name])
                    thinker.fill(warm["distances"])
                for batch in progress.track(batches[done : a.rounds], description=f"{pool} pool"):
                    found_now = _in_turns(thinkers, ways, batch)
                    for name, served in found_now.items():
                        rounds[name].append(asdict(served))
                    if {"random", "stale"} <= found_now.keys():
                        saved = (found_now[name].ended for name in ("random", "stale"))
                        ways["random"] = drawn = _equal(ways["random"] or _DRAWN, *saved)
                        warm["random_share"] = drawn["random_share"]
                    write_files(self.a, self.found)
                for thinker in thinkers.values():
                    thinker.close()

    # -- quality -------------------------------------------------------------------------------------------------

    def quality(self) -> None:
        """By text and way, what each chain gave."""
        for text in self.a.texts:
            self._compare(text, list(islice(self.tasks(text, "quality"), self.a.chains)))

    def _compare(self, text: str, tasks: list[Task]) -> None:
        a = self.a
        ways: dict[str, dict[str, Any] | None] = {"exact": None}
        for rotation in _ROTATIONS:
            ways |= {f"{rotation} {p:g}": self._fields(rotation, p) for p in a.percentiles}
        warm = self._warm(text)
        ways["random"] = _DRAWN | {"random_share": warm["random_share"]}
        thinker = self.thinker(True, a.batch * (2 * a.length + 512))
        thinker.fill(warm["distances"])
        found: dict[str, list[dict[str, Any]]] = self.found.setdefault("quality", {}).setdefault(_name(text), {})
        with Progress(console=Console(stderr=True)) as progress:
            starts = range(len(found.get("exact", ())), len(tasks), a.batch)
            for start in progress.track(starts, description=_name(text)):
                for name, mine in compare(thinker, ways, tasks[start : start + a.batch]).items():
                    found.setdefault(name, []).extend(asdict(one) for one in mine)
                warm["distances"] = thinker.distances()
                write_files(self.a, self.found)
        thinker.close()

    def _warm(self, text: str) -> dict[str, Any]:
        """Reservoirs of distances and a share of random sharing that saves as many pages as the percentile, of a text.

        Texts without similar steps never fill them. What was found before is taken over.
        """
        a, warm = self.a, self.found.setdefault("warm", {})
        if _name(text) in warm:
            found: dict[str, Any] = warm[_name(text)]
            return found
        thinker = self.thinker(True, a.batch * (2 * a.length + 512))
        chains, drawn, shared = self.tasks(text, "warm-up"), [], []
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task(f"{_name(text)}, warm-up", total=WARM_UP)
            for _ in range(a.warm_up):
                batch = list(islice(chains, a.batch))
                least = min(map(len, thinker.distances().values()))
                progress.update(bar, completed=least)
                if not batch or least >= WARM_UP:
                    break
                drawn += thinker.recall(batch, _DRAWN)
                for rotation in _ROTATIONS:
                    shared += thinker.recall(batch, self._fields(rotation, 100))
        share = _equal(_DRAWN, drawn, [a.percentile / 100 * amsr for amsr in shared])["random_share"]
        warm[_name(text)] = {"distances": thinker.distances(), "random_share": share}
        thinker.close()
        write_files(self.a, self.found)
        return self._warm(text)


def _equal(drawn: dict[str, Any], found: list[float], wanted: list[float]) -> dict[str, Any]:
    """Options of random sharing that save as many pages as is wanted, after what they saved."""
    if not found or not fmean(found):
        return dict(_DRAWN)
    return drawn | {"random_share": min(drawn["random_share"] * fmean(wanted) / fmean(found), 1.0)}


def _in_turns(
    thinkers: dict[str, Thinker], ways: dict[str, dict[str, Any] | None], batch: Sequence[Task]
) -> dict[str, Served]:
    """A batch in all ways, some steps of each at a time: what else happens on the machine happens to all of them."""
    servings = {name: thinkers[name].serve(batch, reuse) for name, reuse in ways.items()}
    live = list(servings.values())
    while live:
        live = [serving for serving in live if serving.go_on()]
    return {name: serving.served() for name, serving in servings.items()}


def _name(text: str) -> str:
    """For tables."""
    return Path(text).stem

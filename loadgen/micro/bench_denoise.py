"""`ramet bench denoise`: cost of a diffusion request with and without reuse of its prefix, beside the cost model.

Without a model, the default one without its causal mask is measured: its answers mean nothing, but their cost does not
depend on the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadgen.http.tables import make_table
from loadgen.micro.cost_model import modelled_passes
from runtime.config import DEFAULT_MODEL, make_config
from runtime.engine.offline import Engine
from runtime.errors import ModelError
from runtime.frontend.output import Submission
from runtime.models.resolve import resolve_model
from runtime.params import DiffusionParams, SamplingParams
from runtime.reuse.bicache.boundary_states import BoundaryStore
from runtime.reuse.bicache.strategy import BiCache

_GREEDY = SamplingParams(temperature=0, ignore_eos=True)
# A reserved token of the default model's vocabulary.
_MASK = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One way to treat the prefix.

    Attributes:
        cost: passes over all rows by the cost model, from refreshing steps, other steps and the ratio.
        is_recomputed: whether each refresh computes the boundary states anew.
    """

    name: str
    params: DiffusionParams
    cost: Callable[[int, int, float], float]
    is_recomputed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a diffusion model; default: the default model without its causal mask")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--prefix", type=int, default=512, help="shared tokens (default: 512)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt that follow (default: 16)")
    parser.add_argument("--gen-length", type=int, default=64, help="masks (default: 64)")
    parser.add_argument("--steps", type=int, default=32, help="denoising steps (default: 32)")
    parser.add_argument("--refresh-interval", type=int, default=16, help="default: 16")
    parser.add_argument("--depth", type=int, default=18, help="layers that are reused (default: 18)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: 3)")


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or _without_mask(Path(directory))
        with Engine(model, dtype=arguments.dtype) as engine:
            if not isinstance(bicache := engine.core.strategy, BiCache):
                raise ModelError(f"{engine.info.architecture} is no diffusion model")
            cases = _cases(arguments, engine.core.executor.spec.num_layers)
            seconds = _measure(arguments, cases, engine, bicache)
            first = {case.name: _first_steps(arguments, case, engine) for case in cases if not case.is_recomputed}
    length = arguments.prefix + arguments.prompt + arguments.gen_length
    refreshes = -(-arguments.steps // arguments.refresh_interval)
    others, ratio = arguments.steps - refreshes, arguments.prefix / length
    title = f"{length} rows, {ratio:.1%} shared, {arguments.steps} steps, {refreshes} refreshes"
    table = make_table(title, ("", "seconds", "min", "max", "full passes", "cost model"))
    full = statistics.median(seconds[0]) / arguments.steps
    for case, values in zip(cases, seconds, strict=True):
        middle = statistics.median(values)
        table.add_row(
            case.name, *(f"{value:.2f}" for value in (middle, min(values), max(values))),
            f"{middle / full:.1f}", f"{case.cost(refreshes, others, ratio):.1f}",
        )  # fmt: skip
    Console().print(table)
    Console().print(_first_table(first))
    return 0


def _first_table(first: dict[str, tuple[list[float], list[float]]]) -> Table:
    columns = ("", "first request with a prefix", "min", "max", "second request with it", "min", "max")
    table = make_table("until the first step is done, ms", columns)
    for name, pair in first.items():
        cells = [f"{1e3 * value:.0f}" for times in pair for value in (statistics.median(times), min(times), max(times))]
        table.add_row(name, *cells)
    return table


def _cases(arguments: argparse.Namespace, layers: int) -> list[Case]:
    depth = arguments.depth

    def params(**fields: object) -> DiffusionParams:
        length, interval = arguments.gen_length, arguments.refresh_interval
        same = {"gen_length": length, "block_length": length, "steps": arguments.steps, "refresh_interval": interval}
        return DiffusionParams(**{**same, "prefix_tokens": arguments.prefix, **fields})

    bicache = params(depth=depth)
    return [
        Case("no cache", params(reuse=False), lambda r, o, s: r + o),
        Case("d = 0: refreshed within the request", params(depth=0), lambda r, o, s: modelled_passes(r, o, s, 0)),
        Case(f"BiCache, d = {depth}", bicache, lambda r, o, s: modelled_passes(r, o, s, depth / layers)),
        Case(f"BiCache, d = {depth}, boundary recomputed", bicache, lambda r, o, s: modelled_passes(r, o, s, 0), True),
        Case("naive: reused in all layers", params(depth=layers), lambda r, o, s: modelled_passes(r, o, s, 1)),
    ]


def _measure(arguments: argparse.Namespace, cases: list[Case], engine: Engine, bicache: BiCache) -> list[list[float]]:
    """Seconds of each run by case; the cases take turns, and each has run once before."""
    draw = random.Random(0)
    tokens = [draw.randrange(engine.info.vocab_size) for _ in range(arguments.prefix + arguments.prompt)]
    seconds: list[list[float]] = [[] for _ in cases]
    kept, none = bicache.boundaries, BoundaryStore(0)
    for again in range(arguments.repeat + 1):
        for case, values in zip(cases, seconds, strict=True):
            bicache.boundaries = none if case.is_recomputed else kept
            start = time.perf_counter()
            for _ in engine.stream_all([Submission(tokens, _GREEDY, diffusion=case.params)]):
                pass
            if again:
                values.append(time.perf_counter() - start)
    return seconds


def _first_steps(arguments: argparse.Namespace, case: Case, engine: Engine) -> tuple[list[float], list[float]]:
    """Seconds until the first step is done, of requests with new prefixes and of others with the same ones."""
    # Prefixes that no other case has encoded, and few steps, as the next request waits for the rest of them.
    draw, size = random.Random(case.name), engine.info.vocab_size
    params = case.params.model_copy(update={"stream_canvas": True, "steps": 2})
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(arguments.repeat):
        prefix = [draw.randrange(size) for _ in range(arguments.prefix)]
        for seconds in times:
            tokens = prefix + [draw.randrange(size) for _ in range(arguments.prompt)]
            start = time.perf_counter()
            outputs = engine.stream_all([Submission(tokens, _GREEDY, diffusion=params)])
            next(outputs)
            seconds.append(time.perf_counter() - start)
            for _ in outputs:
                pass
    return times


def _without_mask(directory: Path) -> str:
    """The default model as a diffusion model."""
    source = resolve_model(make_config(model=DEFAULT_MODEL).model)
    for path in source.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["LlamaDiffusionModel"], "model_type": "llama_diffusion"}
    config |= {"mask_token_id": _MASK, "logits_shift": 1}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)

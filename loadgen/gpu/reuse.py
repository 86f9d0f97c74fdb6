"""Reuse beyond prefixes on the GPU: prompt modules, documents anywhere in a prompt, and drafts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.gpu.drive import OneAtATime
from loadgen.gpu.figures import Figures, Item
from loadgen.micro import bench_drafts
from loadgen.micro.documents import FULL, PREFIX, Documents, Shape
from loadgen.micro.documents import ways as ways_of_documents
from loadgen.micro.modules import OTHER, SAME, Modules, imports
from runtime.engine.offline import Engine

_METHODS = ("a3", "cacheblend", "prophetkv", "legolink", "pie")


def modules(path: Path, device: str) -> Iterator[Item]:
    """Time to the first token of prompts of modules, and decoding of many that share some."""
    lengths: tuple[int, ...]
    if device == "cuda":
        lengths, shared, requests, repeats, sizes = (1024, 4096), 4096, 32, 5, (8, 64, 24)
    else:
        lengths, shared, requests, repeats, sizes = (48,), 64, 2, 1, (2, 4, 6)
    ways = (FULL, OTHER, SAME, imports(0), imports(10))

    def first(bench: Modules, length: int) -> Figures:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(-1, repeats):  # the first turn fills the cache
            for way in ways:
                seconds = bench.first(length, way, random.Random(number))["ttft"]
                found[way] += [1e3 * seconds] if number >= 0 else []
        shown = {f"{way}, ms": statistics.median(times) for way, times in found.items()}
        return {**shown, "full prefill / modules": shown[f"{FULL}, ms"] / shown[f"{imports(0)}, ms"]}

    def together(bench: Modules) -> Figures:
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-1, repeats):
            for is_imported, times in found.items():
                seconds = bench.together(shared, requests, is_imported)["step"]
                times += [1e3 * seconds] if number >= 0 else []
        modules_ms, prefix_ms = (statistics.median(found[which]) for which in (True, False))
        return {"modules, ms": modules_ms, "prefix, ms": prefix_ms, "modules / prefix": modules_ms / prefix_ms}

    with closing(OneAtATime(lambda: Modules(path, *sizes, max_running=requests, **_options(device)))) as engine:
        for length in lengths:
            yield f"first token, {length} tokens of modules", partial(engine.call, partial(first, length=length))
        yield f"a decode step of {requests} that share {shared}", partial(engine.call, together)


def documents(path: Path, device: str) -> Iterator[Item]:
    """Time to the first token of prompts with documents that are all cached, in an order that is new."""
    count, shape, repeats = (8, Shape(), 5) if device == "cuda" else (2, Shape(32, 16, 8), 1)
    grid = ways_of_documents(_METHODS, [0.15], ["page"])

    def first(bench: Documents, name: str) -> Figures:
        every = {FULL: None, PREFIX: None, name: grid[name]}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in every}
        for number in range(repeats):
            for way, asked in every.items():
                found[way].append(bench.first(count, way, asked, random.Random(number)))
        full, prefix, mine = (1e3 * statistics.median(one["ttft"] for one in found[way]) for way in every)
        rows, all_rows = (statistics.median(one["row_layers"] for one in found[way]) for way in (name, FULL))
        return {
            "full prefill, ms": full, "prefix caching, ms": prefix, "this, ms": mine,
            "full prefill / this": full / mine, "of its rows x layers, %": 100 * rows / all_rows,
        }  # fmt: skip

    with closing(OneAtATime(lambda: Documents(path, count, shape, **_options(device)))) as engine:
        for name in grid:
            yield f"{count} documents of {shape.length}: {name}", partial(engine.call, partial(first, name=name))


def drafts(path: Path, device: str) -> Iterator[Item]:
    """Output tokens a second with drafts and without, where the answer repeats what was said."""
    tasks, clients = (("quote", "edit", "again"), (1, 8, 32)) if device == "cuda" else (("again",), (1,))
    rounds, questions, output = (3, 2, 128) if device == "cuda" else (1, 2, 4)

    def cell(engine: Engine, task: str, users: int) -> Figures:
        bench = bench_drafts.Drafts(questions=questions, output=output)
        found: dict[str, list[float]] = {"off": [], "auto": [], "right": []}
        with bench.on(engine):
            for number in range(-1, rounds):
                for way in ("off", "auto"):
                    one = bench.measure({"task": task, "clients": users, "drafts": way}, random.Random(number))
                    found[way] += [one["rate"]] if number >= 0 else []
                    found["right"].append(one.get("right", 0.0))
        off, auto = (statistics.median(found[name]) for name in ("off", "auto"))
        rates = {"off, tokens/s": off, "auto, tokens/s": auto, "auto / off": auto / off}
        return {**rates, "right of drafted, %": 100 * max(found["right"])}

    with closing(OneAtATime(lambda: Engine(str(path), drafts="auto", **_options(device)))) as engine:
        for task in tasks:
            for users in clients:
                yield f"{task}, {users} clients", partial(engine.call, partial(cell, task=task, users=users))


def _options(device: str) -> dict[str, Any]:
    # Two engines fit, each with its weights.
    options: dict[str, Any] = {"device": device, "random_weights": True, "dtype": "bfloat16", "pool_tokens": 65536}
    return options if device == "cuda" else {**options, "pool_tokens": 8192, "kernels": "torch", "dtype": "float32"}

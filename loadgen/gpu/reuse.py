"""Reuse beyond prefixes on the GPU: prompt modules, documents anywhere in a prompt, and drafts."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.gpu.drive import OneAtATime
from loadgen.gpu.figures import Figures, Item
from loadgen.http.prose import Prose
from loadgen.micro import bench_drafts
from loadgen.micro.bench_modules import Modules
from loadgen.micro.documents import FULL, PREFIX, Documents, Shape, ways
from runtime.engine.offline import Engine

_METHODS = ("a3", "cacheblend", "prophetkv", "legolink", "pie")


def modules(path: Path, device: str) -> Iterator[Item]:
    """Time to the first token of prompts of modules, and decoding of many that share some."""
    lengths: tuple[int, ...]
    if device == "cuda":
        lengths, shared = (1024, 4096), 4096
        given = argparse.Namespace(modules=8, new=64, arguments=[0, 10], together=32, steps=24, repeats=5)
    else:
        lengths, shared = (48,), 64
        given = argparse.Namespace(modules=2, new=4, arguments=[0, 10], together=2, steps=2, repeats=1)

    def first(bench: Modules, length: int) -> Figures:
        found = {f"{name}, ms": statistics.median(one["ttft"]) for name, one in bench.first(length).items()}
        full, imported = found["full prefill, ms"], found["modules, 0 % arguments, ms"]
        return {**found, "full prefill / modules": full / imported}

    def together(bench: Modules) -> Figures:
        steps = {name: statistics.median(one["step"]) for name, one in bench.together(shared).items()}
        shown = {f"{name}, ms": step for name, step in steps.items()}
        return {**shown, "modules / prefix": steps["modules"] / steps["prefix"]}

    with closing(OneAtATime(lambda: Modules(path, given, **_options(device)))) as engine:
        for length in lengths:
            yield f"first token, {length} tokens of modules", partial(engine.call, partial(first, length=length))
        yield f"a decode step of {given.together} that share {shared}", partial(engine.call, together)


def documents(path: Path, device: str) -> Iterator[Item]:
    """Time to the first token of prompts with documents that are all cached, in an order that is new."""
    count, shape, repeats = (8, Shape(), 5) if device == "cuda" else (2, Shape(32, 16, 8), 1)
    grid = ways(_METHODS, [0.15], ["page"])

    def first(bench: Documents, name: str) -> Figures:
        found = bench.first(count, {name: grid[name]}, repeats, lambda: None)
        full, prefix, mine = (statistics.median(found[way].ttft) for way in (FULL, PREFIX, name))
        rows = statistics.median(found[name].row_layers) / statistics.median(found[FULL].row_layers)
        return {
            "full prefill, ms": full, "prefix caching, ms": prefix, "this, ms": mine,
            "full prefill / this": full / mine, "of its rows x layers, %": 100 * rows,
        }  # fmt: skip

    with closing(OneAtATime(lambda: _warm(Documents(path, count, shape, **_options(device))))) as engine:
        for name in grid:
            yield f"{count} documents of {shape.length}: {name}", partial(engine.call, partial(first, name=name))


def drafts(path: Path, device: str) -> Iterator[Item]:
    """Output tokens a second with drafts and without, where the answer repeats what was said."""
    tasks, clients = (("quote", "edit", "again"), (1, 8, 32)) if device == "cuda" else (("again",), (1,))
    given = argparse.Namespace(rounds=3 if device == "cuda" else 1, questions=2, output=128 if device == "cuda" else 4)
    draw = random.Random(0)
    prose = Prose(draw)

    def cell(engine: Engine, task: str, users: int) -> Figures:
        found = bench_drafts.measure(engine, draw, prose, task, users, given)
        off, auto = (statistics.median(found[name]) for name in ("off", "auto"))
        right = found["accepted"] / found["drafted"] if found["drafted"] else 0.0
        rates = {"off, tokens/s": off, "auto, tokens/s": auto, "auto / off": auto / off}
        return {**rates, "right of drafted, %": 100 * right}

    with closing(OneAtATime(lambda: Engine(str(path), drafts="auto", **_options(device)))) as engine:
        for task in tasks:
            for users in clients:
                yield f"{task}, {users} clients", partial(engine.call, partial(cell, task=task, users=users))


def _warm(bench: Documents) -> Documents:
    bench.warm_up()
    return bench


def _options(device: str) -> dict[str, Any]:
    # Two engines fit, each with its weights.
    options: dict[str, Any] = {"device": device, "random_weights": True, "dtype": "bfloat16", "pool_tokens": 65536}
    return (
        options if device == "cuda" else {**options, "pool_tokens": 8192, "native_kernels": False, "dtype": "float32"}
    )

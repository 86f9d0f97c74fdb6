"""The server end to end on the GPU: workloads at high concurrency."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from loadgen.gpu.figures import Figures, Item
from loadgen.http.local_server import start_server

_WORKLOADS = ("shared-prefix", "rag", "chat", "few-shot", "unique", "long-decode")


def items(path: Path, device: str, directory: Path, concurrency: tuple[int, ...], scale: float) -> Iterator[Item]:
    """Every workload at every concurrency, all on one server, which ends with the last."""
    options = ["--model", str(path), "--device", device, "--random-weights", "--max-running", str(max(concurrency))]
    if device == "cpu":
        options += ["--pool-tokens", "16384"]
    started: list[tuple[subprocess.Popen[bytes], str]] = []

    def run(users: int, workload: str) -> Figures:
        if not started:
            started.append(start_server(options))
        return serve(started[0][1], workload, users, directory, scale)

    try:
        for users in concurrency:
            for workload in _WORKLOADS if device == "cuda" else ("unique",):
                yield f"{workload}, {users} clients", partial(run, users, workload)
    finally:
        for process, _ in started:
            process.terminate()
            process.wait(60)


def serve(url: str, workload: str, users: int, directory: Path, scale: float) -> Figures:
    """One run of `ramet bench serve`; a `scale` below 1 means fewer requests and shorter prompts."""
    out = directory / "serve.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "loadgen", "serve", "--url", url, "--workload", workload]
    command += ["--concurrency", str(users), "--requests", str(max(round(4 * users * scale), 2)), "--json", str(out)]
    if scale < 1:
        command += ["--prompt-tokens", str(max(round(800 * scale), 1))]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code or not out.exists():
        raise RuntimeError(f"ramet bench serve, {workload} with {users} clients, ended with code {code}")
    found = json.loads(out.read_text(encoding="utf-8").splitlines()[1])["figures"]
    figures = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return figures | {f"{kind} p50": median(found[kind]) for kind in ("ttft", "tpot", "itl", "e2e") if found[kind]}


def with_tokenizer(path: Path, source: Path) -> Path:
    """A model's directory with the tokenizer of another."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, path / name)
    return path

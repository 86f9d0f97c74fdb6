"""The server end to end on the GPU: the suite's workloads at high concurrency."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from loadgen.gpu.figures import Figures, Item
from loadgen.http.local_server import start_server

_CASES = "abcdef"


def items(path: Path, device: str, directory: Path, concurrency: tuple[int, ...], scale: float) -> Iterator[Item]:
    """Every workload at every concurrency, all on one server, which ends with the last."""
    options = ["--model", str(path), "--device", device, "--random-weights", "--max-running", str(max(concurrency))]
    if device == "cpu":
        options += ["--pool-tokens", "16384"]
    started: list[tuple[subprocess.Popen[bytes], str]] = []

    def run(users: int, case: str) -> Figures:
        if not started:
            started.append(start_server(options))
        return suite(started[0][1], case, users, directory, scale)

    try:
        for users in concurrency:
            for case in _CASES if device == "cuda" else "e":
                yield f"case {case}, {users} clients", partial(run, users, case)
    finally:
        for process, _ in started:
            process.terminate()
            process.wait(60)


def suite(url: str, case: str, users: int, directory: Path, scale: float) -> Figures:
    """One run of `ramet bench suite`; `scale`: times as many requests, and times as long prompts."""
    out = directory / "suite.json"
    out.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "loadgen", "suite", "--url", f"ramet={url}", "--cases", case, "--concurrency", str(users),
        "--repeats", "1", "--json", str(out), "--scale", str(scale),
        "--length-scale", str(scale),
    ]  # fmt: skip
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code or not out.exists():
        raise RuntimeError(f"ramet bench suite, case {case} with {users} clients, ended with code {code}")
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    summary = run["result"]["summary"]
    figures = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    latencies = {f"{kind} p50": points.get("p50") for kind, points in summary["latency"].items() if points}
    return figures | latencies


def with_tokenizer(path: Path, source: Path) -> Path:
    """A model's directory with the tokenizer of another."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, path / name)
    return path

"""Signals to a server's process, its group or its engine, at any time of its life, and what they return and leave."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.faults.endings import Stream, follow
from loadgen.faults.server import Finding, Server, find_engine, http_client, ids
from loadgen.http.local_server import free_port, serve_command, wait_ready

_PHASES = ("load", "prefill", "decode", "drain")
_TARGETS = ("process", "group")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TERM, _INT, _HUP, _QUIT = _SIGNALS

# Seconds between two signals that are two, and between two that are one.
_TWICE_S = 1.0
_AT_ONCE = 8
_LEFT_WITHIN_S = 10.0
_END_WITHIN_S = 90.0
# Between the last token of a server that ends by itself and its end.
_ENDS_WITHIN_S = 1.0


class Sent(NamedTuple):
    """A signal, `after_s` seconds behind the one before it."""

    target: str
    number: signal.Signals
    after_s: float = 0.0


class Row(NamedTuple):
    """Signals that are sent in a phase, and the exit code that they should return.

    Attributes:
        code: the exit code; None: the server must go on.
        ignored: signals that the server inherits as ignored.
    """

    phase: str
    name: str
    sent: tuple[Sent, ...]
    code: int | None
    ignored: tuple[signal.Signals, ...] = ()


def _rows() -> list[Row]:
    rows = []
    for phase in _PHASES:
        for target in _TARGETS:
            for number in _SIGNALS:
                once, again = Sent(target, number), Sent(target, number, _TWICE_S)
                name = f"{number.name[3:]} to the {target}"
                rows.append(Row(phase, name, (once,), int(number == _QUIT)))
                rows.append(Row(phase, f"{name}, twice", (once, again), int(number != _HUP)))
    rows += [Row("decode", f"{number.name[3:]} to the engine", (Sent("engine", number),), None) for number in _SIGNALS]
    rows += [Row("start", f"{number.name[3:]} to the group", (Sent("group", number),), -number) for number in _SIGNALS]
    cont = Sent("group", signal.SIGCONT)
    both = (Sent("process", _TERM), Sent("engine", _TERM), Sent("process", signal.SIGCONT))
    rows += [
        Row("decode", "`timeout`: TERM to the process, at once to the group", (both[0], Sent("group", _TERM), cont), 0),
        Row("decode", "systemd: TERM to each process, CONT", both, 0),
        Row("decode", "systemd, SendSIGHUP=yes", (*both, Sent("process", _HUP), Sent("engine", _HUP)), 0),
        Row("decode", "a terminal closes: HUP twice", (Sent("group", _HUP), cont, Sent("group", _HUP, 0.7)), 0),
        Row("decode", "`nohup`: HUP", (Sent("group", _HUP),), None, (_HUP,)),
        Row("decode", "`&` in a script: INT, QUIT", (Sent("group", _INT), Sent("group", _QUIT)), None, (_INT, _QUIT)),
        Row("decode", "HUP, then TERM", (Sent("process", _HUP), Sent("process", _TERM, _TWICE_S)), 1),
        Row("decode", "STOP of the engine, TERM", (Sent("engine", signal.SIGSTOP), Sent("process", _TERM)), 0),
        Row("decode", "KILL of the process", (Sent("process", signal.SIGKILL),), -signal.SIGKILL),
    ]
    return rows


@dataclass
class _Run:
    """One server, and what became of it."""

    row: Row
    process: subprocess.Popen[bytes]
    url: str
    directory: Path
    streams: list[Stream] = field(default_factory=list)
    alive_at_last: bool = False
    sent_s: float = 0.0

    def pid_of(self, target: str) -> int:
        """Of a target, negative for a group."""
        engine = find_engine(self.process.pid) if target == "engine" else None
        return {"process": self.process.pid, "group": -self.process.pid}.get(target) or engine or 0

    async def send(self) -> None:
        for sent in self.row.sent:
            await asyncio.sleep(sent.after_s)
            self.alive_at_last = self.process.poll() is None
            self.sent_s = time.monotonic()
            if self.alive_at_last and (pid := self.pid_of(sent.target)):
                (os.killpg if pid < 0 else os.kill)(abs(pid), sent.number)

    def expected(self) -> int | None:
        """The exit code; where the first signal ended the server before the second came, that of the first.

        A server whose last stream was whole about when the second came may have been ending by itself.
        """
        in_time = self.sent_s + _ENDS_WITHIN_S
        ended = [stream.fate == "whole" and stream.ended_s < in_time for stream in self.streams]
        by_itself = bool(ended) and all(ended) and self.process.returncode == 0
        twice = len(self.row.sent) == 2 and self.row.sent[1].after_s == _TWICE_S
        first_alone = twice and (by_itself or not self.alive_at_last)
        return int(self.row.sent[0].number == _QUIT) if first_alone and self.row.code is not None else self.row.code

    def left_over(self) -> list[str]:
        """Processes of the group, files and a listening port that outlive the server."""
        deadline = time.monotonic() + _LEFT_WITHIN_S
        while (processes := _group(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"{len(processes)} processes"] if processes else []
        files = [path.name for path in (self.directory / "tmp").iterdir()]
        if files:
            found.append(", ".join(files))
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(self.url.rpartition(":")[2]))) == 0:
                found.append("the port")
        if "Traceback" in (log := (self.directory / "log").read_text()) and self.row.phase != "start":
            found.append("a traceback: " + log.splitlines()[-1])
        return found


async def signals(options: Sequence[str], scale: float, draw: random.Random) -> Finding:
    """Every signal, once and twice, in every phase; then supervisors' and shells' ways."""
    rows = _rows()
    if scale < 1:
        rows = draw.sample(rows, max(int(len(rows) * scale), 4))
    at_once = asyncio.Semaphore(2)

    async def one(row: Row, seed: int) -> tuple[list[str], list[str]]:
        async with at_once:
            return await _try(row, options, random.Random(seed))

    results = await asyncio.gather(*(one(row, draw.randrange(1 << 30)) for row in rows))
    problems = [problem for _, found in results for problem in found]
    table = [("phase", "sent", "code", "after", "requests", "left over"), *(cells for cells, _ in results)]
    seen = f"{len(rows) - sum(bool(found) for _, found in results)} of {len(rows)} as they should be"
    return Finding(f"{len(rows)} servers that are sent signals", seen, problems, rows=table)


async def _try(row: Row, options: Sequence[str], draw: random.Random) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as name:
        run = _spawn(row, options, Path(name))
        try:
            return await _treat(run, draw)
        finally:
            for pid in _group(run.process.pid):
                os.kill(pid, signal.SIGKILL)
            run.process.wait()


def _spawn(row: Row, options: Sequence[str], directory: Path) -> _Run:
    (directory / "tmp").mkdir()
    port = free_port()
    # A signal that this process ignores, as `nohup` has it, would be ignored by the server, too.
    wanted = {number: signal.SIG_IGN if number in row.ignored else signal.SIG_DFL for number in _SIGNALS}
    given = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        with (directory / "log").open("w") as log:
            process = subprocess.Popen(
                [*serve_command(port), "--drain-time", "20", "--pool-tokens", "8192", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(directory / "tmp")},
                process_group=0,
            )
    finally:
        for number, handler in given.items():
            signal.signal(number, handler)
    return _Run(row, process, f"http://127.0.0.1:{port}", directory)


async def _treat(run: _Run, draw: random.Random) -> tuple[list[str], list[str]]:
    """The cells of a run's row, and its problems."""
    async with http_client() as http:
        server = Server(run.process, run.url, 0.0, http)
        tasks = await _enter(run, server, draw)
        sent_s = time.monotonic()
        await run.send()
        problems = []
        if run.row.code is None:
            status, answer = await server.generate(ids(draw, 20), 4)
            problems += [] if status == 200 else [f"a good request afterwards: {status} {answer}"]
            run.process.terminate()
        try:
            code = await asyncio.to_thread(run.process.wait, _END_WITHIN_S)
        except subprocess.TimeoutExpired:
            code = None
        took_s = time.monotonic() - sent_s
        if tasks:
            await asyncio.wait(tasks, timeout=30)
    left = await asyncio.to_thread(run.left_over)
    fates = Counter(stream.fate for stream in run.streams)
    expected = run.expected()
    if code != (expected or 0):
        problems.append(f"exit code {code}, not {expected}")
    if code == 0 and set(fates) - {"whole", "aborted", "told", "refused"}:
        problems.append(f"requests: {dict(fates)}")
    problems += [f"left over: {', '.join(left)}"] if left else []
    shown = "serves on" if run.row.code is None and not problems else str(code)
    requests = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()))
    cells = [run.row.phase, run.row.name, shown, f"{took_s:.1f} s", requests, ", ".join(left)]
    return cells, [f"{run.row.phase}, {run.row.name}: {problem}" for problem in problems]


async def _enter(run: _Run, server: Server, draw: random.Random) -> list[asyncio.Task[None]]:
    """Bring a server into its row's phase."""
    if run.row.phase == "start":
        await asyncio.sleep(0.02 + draw.random() / 10)
        return []
    if run.row.phase == "load":
        await _until(lambda: find_engine(run.process.pid), run.process)
        await asyncio.sleep(1.5 * draw.random())
        return []
    await asyncio.to_thread(wait_ready, run.url, run.process)
    length, tokens = (480, 4) if run.row.phase == "prefill" else (20, 450)
    run.streams = [Stream() for _ in range(_AT_ONCE)]
    tasks = [asyncio.create_task(follow(server, ids(draw, length), tokens, stream)) for stream in run.streams]
    if run.row.phase == "prefill":
        await asyncio.sleep(0.15)
        return tasks
    await _until(lambda: all(stream.events for stream in run.streams), run.process)
    if run.row.phase == "drain":
        await server.post("/shutdown")
    return tasks


async def _until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with code {process.returncode} before it was sent a signal")
        await asyncio.sleep(0.01)


def _group(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(group) == leader and state not in "ZX":
            found.append(int(path.parent.name))
    return found

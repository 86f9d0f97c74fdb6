"""A live Ramet server on a small random model, and servers that misbehave."""

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from loadgen.__main__ import main
from tests.server.conftest import LiveServer, start, stop


@pytest.fixture(scope="session")
def ramet(tiny_dir, tmp_path_factory) -> Iterator[LiveServer]:
    """Ramet itself; at the end nothing may be left running in it."""
    log = tmp_path_factory.mktemp("loadgen") / "log"
    server = start(log, "--model", str(tiny_dir), "--served-model-name", "tiny", "--pool-tokens", "8192",
                   "--debug-invariants")  # fmt: skip
    yield server
    server.check_idle()
    assert stop(server) == 0


@pytest.fixture
def bench(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs `python -m loadgen` in this process; returns the exit code, the output and the errors."""
    monkeypatch.setenv("COLUMNS", "250")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loadgen", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def measured(bench, tmp_path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a bench once without a warm-up, with all its files; returns cells and figures of each measurement."""

    def run(name: str, *options: object, repeats: int = 1) -> list[dict[str, Any]]:
        path, plot = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.png"
        path.unlink(missing_ok=True)
        files = ["--json", path, "--plot", plot, "--markdown", tmp_path / f"{name}.md"]
        code, _, errors = bench(name, *options, "--repeats", repeats, "--warmup", 0, "--seed", 1, *files)
        assert code == 0, errors
        assert plot.stat().st_size > 5_000
        assert bench("report", path)[0] == 0
        lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        return [line["cell"] | line["figures"] for line in lines]

    return run


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class BadServer:
    """Speaks just enough HTTP on 127.0.0.1 to do it wrong; `script` has the connection after each POST."""

    def __init__(self, script: Script):
        self._script = script
        self._loop = asyncio.new_event_loop()
        self.requests = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in (left := asyncio.all_tasks(self._loop)):
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [
                    line.split(b":")[1] for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"
                ]
                await reader.readexactly(int(lengths[0]) if lengths else 0)
                if head.startswith(b"POST"):
                    self.requests += 1
                    await self._script(reader, writer, head)
                else:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)


@pytest.fixture
def bad_server() -> Iterator[Callable[[Script], BadServer]]:
    """Makes such servers, and closes them."""
    made: list[BadServer] = []

    def make(script: Script) -> BadServer:
        made.append(BadServer(script))
        return made[-1]

    yield make
    for server in made:
        server.close()

"""`ramet bench user`: a server on a GPU as a user starts it, its first answers, and load."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field, PrivateAttr

from loadgen.harness import Bench, Cell, Figure, repeats_of, warmup_of
from loadgen.http.arrivals import Closed
from loadgen.http.load import Bounds
from loadgen.http.local_server import end_server, free_port, serve_command, small_model, wait_ready
from loadgen.http.run import Plan, execute, prepare
from loadgen.http.summary import spread
from loadgen.http.target import Target
from loadgen.http.workloads.base import length
from loadgen.http.workloads.prompts import Unique

_PROMPT = "The root of the tree. " * 24
_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}, "sure": {"type": "boolean"}},
    "required": ["day", "sure"], "additionalProperties": False,
}  # fmt: skip
# The doctor comes last: it takes memory of the GPU.
_ASKED = ("server", "completions", "stream", "structured")
_LEFT = ("log", "doctor")
# Most lines of the log that are kept, and most characters of them.
_LINES, _WIDTH = 12, 240


class User(Bench):
    """A server as a user starts it: when it is ready, with which attention, its answers, and load on it.

    Without FlashInfer on a GPU, all of it fails.
    """

    figures = (
        Figure("ready", "ready, s"),
        Figure("seconds", "took, s", ".2f"),
        Figure("first", "first token, ms", ".0f", 1e3),
        Figure("again", "the same again, s", ".2f"),
        Figure("warnings", "warnings", ".0f"),
        Figure("requests", "requests/s", plotted=True),
        Figure("rate", "tokens/s", ".0f"),
        Figure("ttft", "TTFT p50, ms", ".0f", 1e3),
        Figure("ttft_p99", "TTFT p99, ms", ".0f", 1e3),
    )

    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)
    model: Path | None = Field(
        None, description="of random weights, as written by `shapes` beside this (default: a small one)"
    )
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu tries the bench")
    clients: tuple[int, ...] = Field((32, 64), description="at once, for --duration each")
    duration: float = Field(15.0, gt=0, description="seconds of each load")
    prompt_tokens: int = Field(512, gt=0, description="of each request of a load")
    output_tokens: int = Field(128, gt=0, description="of each answer of a load")

    _server: subprocess.Popen[bytes] | None = PrivateAttr(None)
    _fault: str = PrivateAttr("")
    _url: str = PrivateAttr("")
    _name: str = PrivateAttr("")  # of the model
    _path: Path = PrivateAttr()
    _log: Path = PrivateAttr()

    @contextmanager
    def session(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
            self._path = stack.enter_context(small_model()) if self.model is None else self.model
            try:
                yield
            finally:
                self._stop()

    def cells(self) -> Iterator[Cell]:
        yield from ({"asked": kind} for kind in _ASKED)
        yield from ({"asked": "load", "clients": clients} for clients in self.clients)
        yield from ({"asked": kind} for kind in _LEFT)

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        if cell["asked"] == "doctor":
            return self._doctor()
        ready_s = self._start()
        match cell["asked"]:
            case "server":
                return {"ready": ready_s}
            case "completions":
                return self._completions()
            case "stream":
                return self._stream()
            case "structured":
                return self._structured()
            case "load":
                return self._load(cell["clients"], draw)
            case _:
                return self._warnings()

    def _start(self) -> float:
        """Start the server, unless it runs; seconds until it was ready.

        Raises RuntimeError, and again with each further call.
        """
        if self._fault:
            raise RuntimeError(self._fault)
        if self._server is not None:
            return 0.0
        started = time.perf_counter()
        self._server = self._launch()
        try:
            wait_ready(self._url, self._server)
            ready_s = time.perf_counter() - started
            found = httpx.get(f"{self._url}/server_info", timeout=60).raise_for_status().json()["model_info"]
            self._name = found["name"]
            if self.device == "cuda" and found["attention_backend"] != "flashinfer":
                raise RuntimeError(f"attention by {found['attention_backend']}: {found['attention_note']}")
        except (RuntimeError, httpx.HTTPError, LookupError) as error:
            self._fault = f"{error}: {' / '.join(self._said()[-3:])}"
            raise RuntimeError(self._fault) from error
        return ready_s

    def _launch(self) -> subprocess.Popen[bytes]:
        """The server's process on a free port."""
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        options = ["--model", str(self._path), "--random-weights", *self._device_options()]
        with self._log.open("wb") as log:
            return subprocess.Popen([*serve_command(port), *options], stdout=log, stderr=log)

    def _device_options(self) -> list[str]:
        return ["--device", "cpu", "--pool-tokens", "32768"] if self.device == "cpu" else []

    def _post(self, route: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self._url}/v1/{route}", json={"temperature": 0, **body}, timeout=60)
        if answer.is_error:
            raise RuntimeError(f"{route}: status {answer.status_code}: {answer.text[:_WIDTH]}")
        found: dict[str, Any] = answer.json()
        return found

    def _completions(self) -> dict[str, Any]:
        """The same prompt twice: the second answer reads the first one's prompt from the tree."""
        times, cached = [], 0
        for _ in range(2):
            started = time.perf_counter()
            found = self._post("completions", model=self._name, prompt=_PROMPT, max_tokens=32, ignore_eos=True)
            times.append(time.perf_counter() - started)
            usage = found["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            if usage["completion_tokens"] != 32:
                raise RuntimeError(f"{usage['completion_tokens']} tokens in place of 32")
        if not cached:
            raise RuntimeError("the second answer found nothing in the tree")
        return {"seconds": times[0], "again": times[1], "cached_tokens": cached}

    def _stream(self) -> dict[str, Any]:
        body = {"model": self._name, "messages": _chat(), "max_tokens": 32, "stream": True, "ignore_eos": True}
        started, first_s, lines = time.perf_counter(), 0.0, list[str]()
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    lines.append(line)
                    first_s = first_s or time.perf_counter() - started
        if len(lines) < 3 or lines[-1] != "data: [DONE]":
            raise RuntimeError(f"a stream of {len(lines)} events: {' '.join(lines[-2:])[:_WIDTH]}")
        return {"first": first_s, "seconds": time.perf_counter() - started, "events": len(lines)}

    def _structured(self) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
        started = time.perf_counter()
        found = self._post(
            "chat/completions", model=self._name, messages=_chat(), max_tokens=256, response_format=form
        )["choices"][0]
        seconds, text = time.perf_counter() - started, found["message"]["content"]
        try:
            if json.loads(text).keys() == _SCHEMA["properties"].keys():
                return {"seconds": seconds}
        except ValueError:
            pass
        raise RuntimeError(f"{text[:_WIDTH]!r} does not follow the schema")

    def _load(self, clients: int, draw: random.Random) -> dict[str, Any]:
        # This API counts tokens: many of a random model's have no text.
        prepared = prepare(Target("ramet", self._url, "generate", self._name))
        workload = Unique(prompt_tokens=length(str(self.prompt_tokens)), output_tokens=length(str(self.output_tokens)))
        bounds = Bounds(duration_s=self.duration, grace_s=20)
        found = execute(prepared, Plan(workload, Closed(clients), bounds, draw.randrange(1 << 32))).figures
        if found["failed"] or not found["completed"]:
            raise RuntimeError(f"{found['failed']} of {found['count']} requests failed: {found['errors']}")
        ttft = spread(found["ttft"])
        assert ttft is not None
        return {
            "requests": found["request_throughput"], "rate": found["output_throughput"], "ttft": ttft["p50"],
            "ttft_p99": ttft["p99"], "unfinished": found["unfinished"],
        }  # fmt: skip

    def _warnings(self) -> dict[str, Any]:
        """What the server warned of so far; errors are a failure."""
        lines = [line for line in self._said() if " WARNING " in line or " ERROR " in line]
        if errors := [line for line in lines if " ERROR " in line]:
            raise RuntimeError(f"{len(errors)} errors in the log: {errors[0]}")
        return {"warnings": len(lines), "lines": lines[:_LINES]}

    def _doctor(self) -> dict[str, Any]:
        """`ramet doctor` beside nothing else; its table goes to the output."""
        self._stop()
        command = [sys.executable, "-m", "server.cli", "doctor", "--model", str(self._path), *self._device_options()]
        started = time.perf_counter()
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        print(found.stdout, found.stderr, file=sys.stderr, flush=True)
        if found.returncode:
            raise RuntimeError(f"exit status {found.returncode}: {found.stderr.strip()[-_WIDTH:]}")
        return {"seconds": time.perf_counter() - started, "lines": _hints(found.stdout)}

    def _said(self) -> list[str]:
        return [line[:_WIDTH] for line in self._log.read_text("utf-8", errors="replace").splitlines()]

    def _stop(self) -> None:
        """End the server, and print its log without the lines of single requests."""
        if self._server is None:
            return
        end_server(self._server)
        self._server = None
        print(*(line for line in self._said() if " ramet.access " not in line), sep="\n", file=sys.stderr, flush=True)


def _chat() -> list[dict[str, str]]:
    return [{"role": "user", "content": "Say hello."}]


def _hints(report: str) -> list[str]:
    """What the doctor recommends."""
    return [line[2 : _WIDTH + 2] for line in report.splitlines() if line.startswith("- ")][:_LINES]

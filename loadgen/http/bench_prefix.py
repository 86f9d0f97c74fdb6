"""`ramet bench prefix`: time to first token of a long shared prefix and a short question, cold and warm."""

import json
import random
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
from pydantic import Field

from loadgen.harness import Bench, BenchError, Cell, Figure, repeats_of
from loadgen.http.local_server import local_server

_COLD, _WARM, _ALONE = "cold", "warm", "question alone"


class Prefix(Bench):
    """Time to first token of a prompt with a prefix of its own, with a cached one, and of the question alone."""

    figures = (Figure("ttft", "TTFT, ms", ".0f", 1000, versus="ratio"), Figure("cached", "cached tokens", ".0f"))

    repeats: int = repeats_of(7)
    url: str | None = Field(None, description="a running server with /generate (default: one is started)")
    prefix_tokens: int = Field(4096, gt=0, description="tokens of the prefix")
    question_tokens: int = Field(128, gt=0, description="tokens of the question")
    server_options: str = Field("", description="options of the server that is started, as one text")

    _client: httpx.Client
    _vocabulary: int

    @contextmanager
    def session(self) -> Iterator[None]:
        server = nullcontext(self.url) if self.url else local_server(shlex.split(self.server_options))
        with server as url, httpx.Client(base_url=url, timeout=600) as self._client:
            info = self._client.get("/server_info").raise_for_status().json()["model_info"]
            self._vocabulary = info["vocab_size"]
            yield

    def baseline(self) -> tuple[str, str]:
        return "prompt", _COLD

    def cells(self) -> list[Cell]:
        return [{"prompt": kind} for kind in (_COLD, _WARM, _ALONE)]

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        """Every measurement has a prefix of its own; a warm one has been computed just before. Raises BenchError."""
        draw = random.Random(f"{draw.random()} {cell['prompt']}")
        prefix = [] if cell["prompt"] == _ALONE else self._ids(draw, self.prefix_tokens)
        if cell["prompt"] == _WARM:
            self._first_token(prefix + self._ids(draw, self.question_tokens))
        seconds, cached = self._first_token(prefix + self._ids(draw, self.question_tokens))
        expected = self.prefix_tokens if cell["prompt"] == _WARM else 0
        if abs(cached - expected) > 16:
            raise BenchError(f"{cell['prompt']}: {cached} tokens came from the cache, not about {expected}")
        return {"ttft": seconds, "cached": cached}

    def _ids(self, draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(self._vocabulary // 8, self._vocabulary) for _ in range(count)]

    def _first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and cached prompt tokens."""
        body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        start = time.perf_counter()
        with self._client.stream("POST", "/generate", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    return time.perf_counter() - start, event["meta_info"]["cached_tokens"]
        raise BenchError("the stream ended without a token")

"""The modules of the repository that a token passes in steady decode, from the engine's loop to the SSE text."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import radix
from runtime.config import make_config
from runtime.frontend.async_engine import AsyncEngine
from runtime.offline import EngineThread
from server.app import create_app

ROOT = Path(radix.__file__).parents[1]
PACKAGES = ("radix", "runtime", "server")
# Rooms around the model's step; and modules and calls of functions in all packages.
AROUND, MOST_AROUND = ("runtime/engine", "runtime/frontend", "server"), 13
MOST_MODULES, MOST_CALLS = 24, 126
# Steady decode: the tokens of the stream between these two, without a new page among them.
FIRST, LAST = 20, 28


class Watch:
    """Counts the calls of functions in a module of the repository, while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame, event, arg) -> None:
        if self.on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
                self.calls[path.relative_to(ROOT).as_posix(), frame.f_code.co_name] += 1


async def stream(config, watch: Watch) -> int:
    """Stream one answer through the server's application; the number of tokens between FIRST and LAST."""
    host = EngineThread(config)
    engine = AsyncEngine(config, host=host)
    await engine.start()
    step = host.core.step
    host.core.step = lambda: sys.setprofile(watch) or step()
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body = json.dumps({"input_ids": [7] * 9, "stream": True, "sampling_params": sampling}).encode()
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
        "state": {},
    }
    pending, number, tokens = [body], 0, [0, 0]

    async def receive():
        if not pending:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pending.pop(), "more_body": False}

    async def send(message) -> None:
        nonlocal number
        for line in message.get("body", b"").split(b"\n"):
            if line.startswith(b"data: {"):
                number = json.loads(line.removeprefix(b"data: "))["meta_info"]["completion_tokens"]
        if not watch.on and FIRST <= number < LAST:
            watch.on, tokens[0] = True, number
        elif watch.on and number >= LAST:
            watch.on, tokens[1] = False, number

    sys.setprofile(watch)
    try:
        await create_app(engine, config, [])(scope, receive, send)
    finally:
        sys.setprofile(None)
        await engine.stop()
    return tokens[1] - tokens[0]


def test_a_decoded_token_passes_few_modules(default_model_dir):
    config = make_config(model=str(default_model_dir), pool_tokens=1024, page_size=64, step_timeout=0, drafts="off")
    found = []
    for _ in range(3):  # the engine's thread may be a step or two ahead of the tokens that were sent
        watch = Watch()
        found.append((asyncio.run(stream(config, watch)), watch))
    count, watch = min(found, key=lambda one: sum(one[1].calls.values()) / max(one[0], 1))
    assert count > 0
    modules = {path for (path, _), calls in watch.calls.items() if calls >= count / 2}
    around = {path for path in modules if path.startswith(AROUND)}
    assert len(around) <= MOST_AROUND, sorted(around)
    assert len(modules) <= MOST_MODULES, sorted(modules)
    assert sum(watch.calls.values()) / count <= MOST_CALLS, watch.calls.most_common()

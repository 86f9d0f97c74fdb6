"""A way to replicas that are chosen in this process: at random, in turn, by our placement, by Dynamo's service."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from loadgen.fleet.replicas import PAGE, Replica
from radix import Namespace
from radix.events import block_hashes
from runtime.models.tokenizer import Tokenizer
from server.ray.follower import Follower
from server.ray.placement import Placement

_TOKEN_BYTES = 4
_JSON = {"Content-Type": "application/json"}
_AGAIN_S = 0.1


class Chooser(Protocol):
    """Chooses among replicas by number, on one event loop.

    `join` and `leave` tell of replicas, `choose` answers for a call and a prompt, `end` tells that the call has ended.
    """

    def join(self, number: int, replica: Replica) -> None: ...
    def leave(self, number: int) -> None: ...
    async def choose(self, call: str, prompt: Sequence[int]) -> int: ...
    async def end(self, call: str) -> None: ...
    async def close(self) -> None: ...


class Blind:
    """Knows nothing: `draw` takes one of those that there are."""

    def __init__(self, draw: Callable[[Sequence[int]], int]):
        self._draw = draw
        self._numbers: list[int] = []

    def join(self, number: int, replica: Replica) -> None:
        self._numbers.append(number)

    def leave(self, number: int) -> None:
        self._numbers.remove(number)

    async def choose(self, call: str, prompt: Sequence[int]) -> int:
        return self._draw(self._numbers)

    async def end(self, call: str) -> None:
        """Nothing is known of calls."""

    async def close(self) -> None:
        """Nothing is open."""


def at_random(seed: int) -> Blind:
    """Each with the same chance."""
    return Blind(random.Random(seed).choice)


def in_turn() -> Blind:
    """Round robin."""
    turn = itertools.count()
    return Blind(lambda numbers: numbers[next(turn) % len(numbers)])


class Placed:
    """By the placement of Ray Serve's router, fed by the replicas' KV events."""

    def __init__(self, seed: int):
        self._placement = Placement[int](PAGE, chooser=random.Random(seed))
        self._followers: dict[int, Follower[int]] = {}
        self._where: dict[str, int] = {}

    def join(self, number: int, replica: Replica) -> None:
        self._placement.join(number)
        self._followers[number] = Follower(self._placement.index, number, replica.events, replica.replay)

    def leave(self, number: int) -> None:
        self._followers.pop(number).close()
        self._placement.leave(number)

    async def choose(self, call: str, prompt: Sequence[int]) -> int:
        hashes = block_hashes(array("i", prompt).tobytes(), PAGE * _TOKEN_BYTES, None, Namespace())
        chosen = self._placement.rank(hashes, self._followers)[0]
        self._placement.begin(chosen, call, hashes)
        self._where[call] = chosen
        return chosen

    async def end(self, call: str) -> None:
        self._placement.end(self._where.pop(call), call)

    async def close(self) -> None:
        for follower in self._followers.values():
            follower.close()


class Dynamo:
    """By Dynamo's selection service, which is told when calls begin and end."""

    def __init__(self, url: str, session: ClientSession):
        self._url = url
        self._session = session
        self._told: list[asyncio.Task[Any]] = []
        self._selections: dict[str, str] = {}

    def join(self, number: int, replica: Replica) -> None:
        worker = {
            **{"worker_id": number + 1, "endpoint": replica.url, "model_name": "tiny", "block_size": PAGE},
            **{"kv_events_endpoints": {"0": replica.events}, "replay_endpoint": replica.replay},
        }
        self._told.append(asyncio.ensure_future(self._post("/workers", worker)))

    def leave(self, number: int) -> None:
        self._told.append(asyncio.ensure_future(self._delete(f"/workers/{number + 1}")))

    async def choose(self, call: str, prompt: Sequence[int]) -> int:
        await asyncio.gather(*self._told)
        found = await self._post("/select_and_reserve", {"model_name": "tiny", "token_ids": list(prompt)})
        self._selections[call] = found["selection_id"]
        return int(found["worker_id"]) - 1

    async def end(self, call: str) -> None:
        await self._delete(f"/reservations/{self._selections.pop(call)}")

    async def close(self) -> None:
        await self._session.close()

    async def _post(self, path: str, body: object) -> dict[str, Any]:
        async with self._session.post(self._url + path, json=body) as answer:
            answer.raise_for_status()
            return dict(await answer.json())

    async def _delete(self, path: str) -> None:
        async with self._session.delete(self._url + path) as answer:
            answer.raise_for_status()


class Proxy:
    """An HTTP server of one route, `/v1/completions`, in a thread of its own, over replicas that may come and go.

    A call that its replica had not begun to answer is sent to another one if that dies.

    Attributes:
        url: of the server, while it runs.
    """

    def __init__(self, make: Callable[[], Chooser], tokenizer: Path, replicas: Sequence[Replica]):
        self._make = make
        self._tokenizer = Tokenizer.load(tokenizer)
        self._replicas: dict[int, Replica] = {}
        self._names = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        ready: Future[str] = Future()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(ready),))
        self._thread.start()
        self.url = ready.result(60)
        for replica in replicas:
            self.join(replica)

    async def _run(self, ready: Future[str]) -> None:
        timeout = ClientTimeout(total=None)
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self._http:
            self._chooser = self._make()
            app = web.Application(client_max_size=1 << 26)
            app.router.add_post("/v1/completions", self._answer)
            runner = web.AppRunner(app, handle_signals=False)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
            await self._ended.wait()
            await runner.cleanup()
            await self._chooser.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        prompt = self._tokenizer.encode(json.loads(body)["prompt"])
        while True:
            call = str(next(self._names))
            number = await self._chooser.choose(call, prompt)
            answer: web.StreamResponse | None = None
            try:
                async with self._http.post(self._replicas[number].url + request.path, data=body, headers=_JSON) as got:
                    async for part in got.content.iter_any():
                        if answer is None:
                            answer = web.StreamResponse(status=got.status, headers={"Content-Type": got.content_type})
                            await answer.prepare(request)
                        await answer.write(part)
                if answer is not None:
                    await answer.write_eof()
                    return answer
            except (ClientError, ConnectionError):
                if answer is not None:
                    raise
                await asyncio.sleep(_AGAIN_S)  # until whoever watches replicas has seen it
            finally:
                await self._chooser.end(call)

    def join(self, replica: Replica) -> int:
        """Add a replica; its number."""
        return asyncio.run_coroutine_threadsafe(self._join(replica), self._loop).result(60)

    async def _join(self, replica: Replica) -> int:
        number = len(self._replicas)
        self._replicas[number] = replica
        self._chooser.join(number, replica)
        return number

    def leave(self, number: int) -> None:
        """Choose a replica no more."""
        self._loop.call_soon_threadsafe(self._chooser.leave, number)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)
        self._loop.close()


@contextmanager
def running_proxy(make: Callable[[], Chooser], tokenizer: Path, replicas: Sequence[Replica]) -> Iterator[Proxy]:
    """A proxy over replicas, until the end of the block; `make` is called on its event loop."""
    proxy = Proxy(make, tokenizer, replicas)
    try:
        yield proxy
    finally:
        proxy.close()

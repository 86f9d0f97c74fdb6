"""AsyncEngine: the engine process as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq
import zmq.asyncio

from radix import Namespace
from runtime import protocol
from runtime.config import Config
from runtime.errors import DeadlineExceeded, EngineDead, ModelError, PinRefused, RametError
from runtime.frontend.adapters import Adapters
from runtime.frontend.output import PlacedPrompt, Submission, expected_tokens
from runtime.frontend.processor import Frontend
from runtime.frontend.stream import OutputStream
from runtime.frontend.text_work import TextWork
from runtime.frontend.watchdog import Watchdog
from runtime.models.publishing import scratch
from runtime.models.resolve import resolve_model
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.fusion.plan import Planner

log = logging.getLogger("ramet.client")
_STOP_SECONDS = 10
# Modules that are looked up between two steps.
_ENTRIES = 64

T = TypeVar("T")


class AsyncEngine:
    """Starts the engine process, tokenizes, submits, detokenizes and streams. Used from one event loop.

    Attributes:
        config: the whole configuration.
        info: the loaded model; set by `start`.
        tokenizer: its tokenizer; set by `start`.
        paused: whether the engine is paused.
        adapters: of the model, by name.
    """

    config: Config
    info: protocol.ModelInfo
    tokenizer: Tokenizer

    def __init__(self, config: Config, quotas: Mapping[str, int] | None = None):
        """`quotas`: cached pages by account; others have `--tenant-quota`."""
        self.config = config
        self._quotas = dict(quotas or {})
        self._frontend: Frontend | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._dead = asyncio.Event()
        self._walking = asyncio.Lock()
        self._stopping = False
        self._work = TextWork(config.engine.grammar_timeout)
        self._supervisor: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(config.engine.step_timeout)
        self.adapters = Adapters(self._call, config.model)

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process and wait until it is ready. Raises ModelError if it cannot load."""
        path = await self._load()
        self._context = zmq.asyncio.Context()
        try:
            await self._spawn(path)
        except BaseException:
            self._close()
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self.adapters.open()
        except BaseException:
            await self.stop()
            raise

    async def _load(self) -> Path:
        """The model's directory, verified, and its tokenizer. Raises ModelError."""
        path = await asyncio.to_thread(resolve_model, self.config.model)
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, path, self.config.model.chat_template)
        return path

    async def _spawn(self, path: Path) -> None:
        self.paused = False
        self._inbox = zmq.Socket(self._context, zmq.PUSH)
        self._outbox = self._context.socket(zmq.PULL)
        try:
            # Only the owner may enter the directory, so its sockets are private. Once connected, they need no names.
            with scratch(Path(tempfile.gettempdir()), "ramet-sockets-") as directory:
                await self._start_process(path, directory)
        except (OSError, zmq.ZMQError) as error:
            raise ModelError(f"the engine process cannot be started: {error}") from None
        cache, limits = self.config.cache, self.config.scheduler
        planner = Planner.load(cache.document_reuse, path)
        self._frontend = Frontend(
            self.info, self.tokenizer, self._send, limits, planner=planner, reasoning=cache.reasoning_cache
        )
        self._reader = asyncio.create_task(self._read())
        self._watch = asyncio.create_task(self._watchdog.watch(lambda: self._call(protocol.Ping), self._kill))

    async def _start_process(self, path: Path, directory: Path) -> None:
        boot: dict[str, Any] = {"config": self.config.model_dump_json(), "path": str(path), "quotas": self._quotas}
        for name, socket in (("inbox", self._inbox), ("outbox", self._outbox)):
            boot[name] = f"ipc://{directory / name}"
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(boot[name])
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "runtime.engine.process", stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(boot) + b"\n")
        try:
            self.info = await self._await_ready()
        except BaseException:
            self._kill()
            await self._process.wait()
            raise

    async def _await_ready(self) -> protocol.ModelInfo:
        first = asyncio.ensure_future(self._outbox.recv())
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((first, ended), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                # The process may have sent its reason just before it ended.
                await asyncio.wait((first,), timeout=0.5)
            if not first.done():
                raise ModelError(f"the engine process ended with code {ended.result()} before it was ready")
            message = protocol.outbound_decoder.decode(first.result())
        finally:
            first.cancel()
            ended.cancel()
        if isinstance(message, protocol.Failed):
            raise ModelError(message.message)
        assert isinstance(message, protocol.Ready)
        return msgspec.convert(message.info, protocol.ModelInfo)

    async def _supervise(self) -> None:
        """Wait for the engine's death; then fail all open requests, and start a new engine if configured."""
        while True:
            code = await self._process.wait()
            if self._stopping:
                return
            log.error("the engine process ended with code %s", code)
            self._reader.cancel()
            self._watch.cancel()
            self._fail(EngineDead("the engine process died; this request is lost"))
            if self.config.engine.on_engine_death == "exit":
                self._dead.set()
                return
            self._inbox.close()
            self._outbox.close()
            try:
                await self._spawn(await self._load())
                await self.adapters.restore()
            except RametError as error:
                log.error("the engine could not be restarted: %s", error.message)
                self._dead.set()
                return
            log.warning("the engine was restarted")

    def kill(self) -> None:
        """End the engine process and all open requests at once, for good."""
        self._stopping = True
        self.give_up()
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def give_up(self) -> None:
        """End open requests with EngineDead, as the engine does not end them."""
        self._fail(EngineDead("the server is shutting down"))

    async def stop(self) -> None:
        """End the engine process; open requests end with EngineDead."""
        self._stopping = True
        self.give_up()
        if self._process.returncode is None:
            self._send(protocol.Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in (self._supervisor, self._reader, self._watch):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._close()

    def _close(self) -> None:
        self._work.close()
        self._inbox.close()
        self._context.destroy(linger=0)

    def _fail(self, error: EngineDead) -> None:
        frontend, self._frontend = self._frontend, None
        if frontend is not None:
            frontend.fail_all(error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)

    @property
    def alive(self) -> bool:
        """Whether the engine process takes requests."""
        return self._frontend is not None

    @property
    def late(self) -> bool:
        """Whether a step has taken longer than --step-timeout and has not ended."""
        return self._watchdog.late

    async def wait_dead(self) -> None:
        """Return when the engine process has died by itself and is not restarted."""
        await self._dead.wait()

    # -- use -------------------------------------------------------------------------------------------------

    async def open(self, submissions: list[Submission], timeout_s: float | None = None) -> OutputStream:
        """Submit prompts. To close the returned stream (a context manager) aborts unfinished completions.

        Args:
            timeout_s: seconds until unfinished completions are aborted and reading raises DeadlineExceeded.

        Raises:
            InvalidRequest: if one of the prompts can never be served; then none is submitted.
            Overloaded, RateLimited: over the limits on open requests.
            DeadlineExceeded: if tokenizing took the whole time.
            EngineDead: if the engine is not running.
        """
        frontend, account = self._running(), submissions[0].account
        wanted, expected = sum(s.sampling.n for s in submissions), sum(s.expected_tokens for s in submissions)
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        try:
            with frontend.admit(account, wanted, expected):
                async with asyncio.timeout_at(deadline_s):
                    encoded = [await self._work.encode(frontend, submission) for submission in submissions]
        except TimeoutError:
            raise _too_late(timeout_s) from None
        stream = OutputStream(self._running(), partial(self._work.run, account))
        if deadline_s is not None:
            stream.timer = loop.call_at(deadline_s, stream.expire, _too_late(timeout_s))
        try:
            for submission, tokens in zip(submissions, encoded, strict=True):
                stream.submit(submission, tokens)
        except RametError:
            stream.close()
            raise
        return stream

    @property
    def num_open(self) -> int:
        return self._frontend.num_open if self._frontend is not None else 0

    async def tokenize(self, account: str, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of texts. Raises InvalidRequest if they cannot fit in the context, Overloaded or RateLimited."""
        frontend = self._running()
        frontend.check_text(sum(map(len, texts)), "prompt")
        encode = self.tokenizer.encode
        with frontend.admit(account, 1, expected_tokens(sum(map(len, texts)))):
            return await self._work.each(account, lambda text: encode(text, add_special_tokens), texts)

    async def in_turn(self, account: str, characters: int, work: Callable[[], T]) -> T:
        """The result of work on an account's text of so many characters. Raises Overloaded, RateLimited."""
        with self._running().admit(account, 1, expected_tokens(characters)):
            return await self._work.run(account, work)

    async def detokenize(self, account: str, several: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Texts of token ids. Raises InvalidRequest for ids that cannot be, Overloaded or RateLimited."""
        frontend, decode = self._running(), self.tokenizer.decode

        def text(ids: list[int]) -> str:
            frontend.check_ids(ids, "tokens")
            return decode(ids, skip_special_tokens)

        with frontend.admit(account, 1, sum(map(len, several))):
            return await self._work.each(account, text, several)

    def abort(self, rid: str | None) -> None:
        """Abort a submission, or all (None); their last Outputs have finish type "abort"."""
        self._running().abort(rid)

    async def flush_cache(self, pins: bool = False, tiers: bool = False) -> dict[str, Any]:
        """Drop cached pages that no live request uses. Returns {"flushed_tokens": int, "live_tokens": int}.

        With `tiers`, also what lies in tiers; then "erased_blocks" by tier, None for one that failed.
        """
        return await self._call(lambda call: protocol.FlushCache(call, pins, tiers))

    async def erase_tenant(self, account: str) -> dict[str, Any]:
        """Drop a tenant's pins and cached pages, and all that it has in tiers."""
        return await self._call(lambda call: protocol.EraseTenant(call, account))

    async def attach_tier(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add a tier; `options`: of `TierConfig`. {"tiers": names}, or {"failed": why}."""
        return await self._call(lambda call: protocol.AttachTier(call, options))

    async def detach_tier(self, name: str) -> bool:
        """Leave a tier once all is written that is queued for it; False if there is none of that name."""
        return (await self._call(lambda call: protocol.DetachTier(call, name)))["found"]

    async def pin(self, prefix: Submission, name: str | None, ttl_s: float | None) -> dict[str, Any]:
        """Keep the whole pages of a prefix in the cache, computed now if they are not there; describes the pin.

        Raises:
            InvalidRequest: if the prefix can never be served.
            PinRefused: over the budget, or if the cache is too busy to keep what was computed.
            Overloaded, RateLimited: over the limits on open requests.
        """
        frontend, space, account = self._running(), prefix.namespace, prefix.account
        with frontend.admit(account, 1, prefix.expected_tokens):
            key = array("i", await self._work.encode(frontend, prefix)).tobytes()
            return (await self._call(lambda call: protocol.AddPin(call, key, space, account, name, ttl_s)))["pin"]

    async def pin_entries(self, encoded: Submission, name: str, ttl_s: float | None) -> list[str]:
        """Keep the KV of all modules or documents that a submission read in the cache; ids of their pins.

        Raises:
            PinRefused: over the budget, or if the cache is too busy to keep them.
            Overloaded, RateLimited: over the limits on open requests.
        """
        prompt, space, account = encoded.prompt, encoded.namespace, encoded.account
        assert isinstance(prompt, PlacedPrompt)
        tokens = array("i", prompt.tokens).tobytes()
        with self._running().admit(account, 1, prompt.length):
            answer = await self._call(
                lambda call: protocol.AddPin(call, tokens, space, account, name, ttl_s, prompt.reuse)
            )
        return [pin["id"] for pin in answer["pins"]]

    async def cached(self, prompt: PlacedPrompt, namespace: Namespace) -> dict[str, int]:
        """Cached tokens of the modules or documents that a prompt reads, by name; few modules at a time."""
        key, found = array("i", prompt.tokens).tobytes(), dict[str, int]()
        asked = prompt.reuse or {}
        if (entries := asked.get("entries")) is None:
            return await self._call(partial(protocol.GetCached, reuse=asked, namespace=namespace, tokens=key))
        most = min(_ENTRIES, self.info.pool_tokens // self.info.page_size)
        for start in range(0, len(entries), most):
            some = {**asked, "entries": entries[start : start + most]}
            found |= await self._call(partial(protocol.GetCached, reuse=some, namespace=namespace))
        return found

    async def unpin(self, pin: str) -> bool:
        """Remove a pin; False if there is none of that id."""
        return (await self._call(lambda call: protocol.RemovePin(call, pin)))["found"]

    async def pins(self) -> dict[str, Any]:
        """All pins and their budget; see `Admin.pins`."""
        return await self._call(protocol.GetPins)

    async def state(self) -> dict[str, Any]:
        """Counters, histograms and gauges of the engine; see `Admin.state`."""
        return await self._call(protocol.GetState)

    async def pause(self, paused: bool) -> bool:
        """Pause or resume the engine; returns whether it is paused. Meanwhile requests are accepted and wait."""
        self.paused = (await self._call(lambda call: protocol.Pause(call, paused)))["paused"]
        return self.paused

    async def tree(self, **asked: Any) -> list[dict[str, Any]]:
        """A page of the tree's nodes as dicts of `radix.NodeView`; `asked`: the fields of `GetTree`."""
        return (await self._call(lambda call: protocol.GetTree(call, **asked)))["nodes"]

    async def outline(self, limit: int, preview_tokens: int, tenant: str | None = None) -> dict[str, Any]:
        """The tree of a tenant, or of all, in at most `limit` `blocks`, and the last `evictions`.

        Blocks are dicts of `radix.Block`, with `parent` as a place in the list, evictions of `radix.Eviction`.
        """
        answer = await self._call(lambda call: protocol.GetOutline(call, limit, preview_tokens, True, tenant))
        while answer["blocks"] is None:
            answer = await self._call(lambda call: protocol.GetOutline(call, limit, preview_tokens, tenant=tenant))
        return answer

    async def runs(self, tenant: str | None, salt: str | None) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The tree's nodes of a tenant and a salt (None: of all), with their tokens, slice by slice, parents first."""
        asked = partial(protocol.GetRuns, tenant=tenant, salt=salt)
        async with self._walking:  # the engine makes one walk at a time
            found = await self._call(partial(asked, anew=True))
            while found["runs"] is not None:
                yield found["runs"]
                found = await self._call(partial(asked, anew=False))

    async def requests(self, limit: int, tenant: str | None = None) -> list[dict[str, Any]]:
        """The live requests of a tenant, or of all, oldest first."""
        return (await self._call(lambda call: protocol.GetRequests(call, limit, tenant)))["requests"]

    async def quota(self, tenant: str) -> dict[str, Any]:
        """A tenant's pages in the tree, and how many it may keep; see `Admin.quota`."""
        return await self._call(lambda call: protocol.GetQuota(call, tenant))

    async def on_node(self, verb: Literal["pin", "unpin", "drop", "read"], page: int, start: int) -> dict[str, Any]:
        """Pin, unpin, evict or read a node of the tree; see `Admin`. Raises PinRefused."""
        return await self._call(lambda call: protocol.OnNode(call, verb, page, start))

    def _running(self) -> Frontend:
        if self._frontend is None:
            raise EngineDead("the engine is not running")
        return self._frontend

    async def _call(self, make: Callable[[int], protocol.Call]) -> dict[str, Any]:
        self._running()
        self._num_calls += 1
        call = self._num_calls
        self._calls[call] = future = asyncio.get_running_loop().create_future()
        message = make(call)
        self._send(message)
        try:
            answer = await future
        except asyncio.CancelledError:
            if isinstance(message, protocol.AddPin):
                self._send(protocol.Abort(message.rid))
            raise
        finally:
            self._calls.pop(call, None)
        if "refused" in answer:
            raise PinRefused(answer["refused"])
        return answer

    # -- wire ------------------------------------------------------------------------------------------------

    def _send(self, message: protocol.Inbound) -> None:
        # Without a high-water mark a send to a PUSH socket with a peer never blocks. Without one (the engine has just
        # died) it would; the message is lost with the engine anyway.
        with contextlib.suppress(zmq.Again):
            self._inbox.send(protocol.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            message = protocol.outbound_decoder.decode(await self._outbox.recv())
            if isinstance(message, protocol.StepEvents):
                for event in message.events:
                    self._handle(event)
            elif isinstance(message, protocol.Reply) and (call := self._calls.get(message.call)) and not call.done():
                call.set_result(message.result)

    def _handle(self, event: protocol.TokenEvent) -> None:
        if self._frontend is None:
            return
        try:
            self._frontend.handle(event)
        except Exception as error:
            # The reader serves all requests and must go on.
            log.exception("the output of request %s could not be processed", event.rid)
            known = error if isinstance(error, RametError) else RametError("the output could not be made into text")
            self._frontend.fail(event.rid, known)


def _too_late(timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request took longer than its {timeout_s:g} seconds", param="timeout_s")

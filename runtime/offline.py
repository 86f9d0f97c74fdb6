"""Ramet as a library: the server's client, and the engine's loop in a thread of the same process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from radix import Namespace
from runtime.asks import REUSE_BY_METHOD, UNKNOWN_REUSE, AnyReuse
from runtime.calls import EngineCall, FlushCache, Flushed, GetState, State
from runtime.config import DEFAULT_MODEL, Config, make_config
from runtime.engine.core import EngineCore
from runtime.engine.loop import in_thread
from runtime.errors import EngineDead, InvalidRequest
from runtime.features.chunks.ask import Mode
from runtime.features.chunks.schemas.schema import Schema
from runtime.features.registry import open_preparers
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.connection import Host
from runtime.frontend.output import Logprobs, Output, Prompt, Submission, prompts_of
from runtime.opening import open_engine
from runtime.params import SamplingParams
from runtime.protocol import Inbound, Outbound, Shutdown

Sampling = SamplingParams | dict[str, Any] | None
Reuse = AnyReuse | dict[str, Any] | None
T = TypeVar("T")
A = TypeVar("A")

_UNLIMITED = 1 << 62


class EngineThread(Host):
    """Runs an engine's loop in a thread of this process."""

    def __init__(self, config: Config):
        self._config = config
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._ended: Future[int] = Future()

    @property
    def core(self) -> EngineCore:
        assert self._loop.core is not None
        return self._loop.core

    @property
    def error(self) -> EngineDead | None:
        return self._loop.error

    @asynccontextmanager
    async def starting(self, path: Path, take: Callable[[Outbound], None]) -> AsyncIterator[None]:
        loop = self._loop = in_thread(self._inbox, asyncio.get_running_loop(), take)

        def end(error: EngineDead) -> None:
            loop.error = loop.error or error
            self.kill()

        def run() -> None:
            code = 1
            try:
                code = loop.run(lambda: open_engine(self._config, path), end)
            finally:
                self._ended.set_result(code)

        threading.Thread(target=run, name="ramet-engine", daemon=True).start()
        yield

    def send(self, message: Inbound) -> None:
        self._inbox.put(message)

    async def wait(self) -> int:
        return await asyncio.wrap_future(self._ended)

    def kill(self) -> None:
        """Ask the thread to end after its current step, since a thread cannot be killed."""
        self._inbox.put(Shutdown())


class Engine:
    """Generates without a server.

    >>> engine = Engine()
    >>> engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})[0].text

    Use it as a context manager, or call `close`. Any thread may use it.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, config: Config | None = None, **options: Any):
        """Load a model.

        Args:
            model: a directory, GGUF file or name, as for `--model`.
            config: the whole configuration, in place of all other arguments.
            options: any option of `ramet serve`, with underscores.

        Raises:
            ModelError: if the model or an adapter of `lora` cannot be loaded.
            ValueError: for an unknown option or a value out of range.
        """
        self.config = config or make_config(model=model, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ramet-client", daemon=True)
        self._thread.start()
        self._host = EngineThread(self.config)
        self._client = self._wait(self._start())
        self.info, self.tokenizer, self.sight = self._client.info, self._client.tokenizer, self._client.sight

    async def _start(self) -> AsyncEngine:
        """A client without the limits that protect a server."""
        scheduler = self.config.scheduler.model_copy(update={"max_waiting": _UNLIMITED})
        engine = self.config.engine.model_copy(update={"step_timeout": 0.0})
        config = self.config.model_copy(update={"scheduler": scheduler, "engine": engine})
        client = AsyncEngine(config, host=self._host, open_preparers=open_preparers)
        try:
            await client.start()
        except BaseException:
            self._loop.call_soon(self._loop.stop)
            raise
        return client

    @property
    def core(self) -> EngineCore:
        """The engine core. The engine's thread uses it, too."""
        return self._host.core

    def schema(self, pml: str, mode: Mode = "independent", scaffolds: Sequence[Sequence[str]] | None = None) -> Schema:
        """A schema of prompt modules; its `compile` makes prompts for `generate`. Raises InvalidRequest for bad PML."""
        return Schema.read(pml, self.tokenizer, self.info.context_length, mode, scaffolds)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = None,
        reuse: Reuse = None,
        adapter: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> list[Output]:
        """Complete prompts; returns the last Output of each completion, by prompt, then by choice.

        Log-probabilities of these Outputs are of all tokens.

        Args:
            prompts: text, token ids or prompts with parts, one or several.
            sampling: parameters for all prompts, or a list with one for each; `SamplingParams` or a dict of its fields.
            reuse: how to reuse KV beyond exact prefixes; one of `AnyReuse`, or a dict of its fields; default: the
                option `reuse`.
            adapter: name of an adapter, as `ADAPTER` or `MODEL:ADAPTER`; None: the model itself.
            logprobs: number of most likely tokens to report beside each output token; 0: none; None: no
                log-probabilities.
            prompt_logprobs_from: first prompt position with log-probabilities; None: none.

        Raises:
            InvalidRequest: if one prompt can never be served, or the adapter is unknown; then no prompt is served.
            RametError: if a completion fails.
        """
        wanted = self._with(adapter, logprobs, prompt_logprobs_from)
        return self._wait(self._collect(make_submissions(prompts, sampling, reuse, **wanted)))

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = None,
        reuse: Reuse = None,
        adapter: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> Iterator[Output]:
        """Complete one prompt; yields Outputs as tokens are generated. Closing the iterator aborts the request."""
        wanted = self._with(adapter, logprobs, prompt_logprobs_from)
        return self.stream_all(make_submissions(prompt, sampling, reuse, **wanted))

    def stream_all(self, submissions: list[Submission]) -> Iterator[Output]:
        """Yield the Outputs of several submissions as tokens are generated."""
        outputs: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        running = self._begin(self._pump(submissions, outputs.put))
        running.add_done_callback(lambda _: outputs.put(None))
        try:
            while (output := outputs.get()) is not None:
                yield output
            running.result()
        finally:
            running.cancel()

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = None,
        reuse: Reuse = None,
        adapter: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> list[Output]:
        """`generate`, without blocking the event loop. Cancelling aborts the requests."""
        wanted = self._with(adapter, logprobs, prompt_logprobs_from)
        submissions = make_submissions(prompts, sampling, reuse, **wanted)
        return await asyncio.wrap_future(self._begin(self._collect(submissions)))

    async def astream(
        self,
        prompt: Prompt,
        sampling: Sampling = None,
        reuse: Reuse = None,
        adapter: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> AsyncIterator[Output]:
        """`stream`, without blocking the event loop."""
        wanted = self._with(adapter, logprobs, prompt_logprobs_from)
        async for output in self.astream_all(make_submissions(prompt, sampling, reuse, **wanted)):
            yield output

    async def astream_all(self, submissions: list[Submission]) -> AsyncIterator[Output]:
        """`stream_all`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()

        def put(output: Output | None) -> None:
            with suppress(RuntimeError):  # the loop may be closed before the requests have ended
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        running = self._begin(self._pump(submissions, put))
        running.add_done_callback(lambda _: put(None))
        try:
            while (output := await outputs.get()) is not None:
                yield output
            running.result()
        finally:
            running.cancel()

    def _with(self, adapter: str | None, logprobs: int | None, prompt_logprobs_from: int | None) -> dict[str, Any]:
        """Fields of a `Submission`. Raises InvalidRequest if the adapter is unknown."""
        wanted = {"logprobs": logprobs, "prompt_logprobs_from": prompt_logprobs_from}
        return {"namespace": self.namespace(adapter), **wanted}

    def load_adapter(self, name: str, path: str, replace: bool = False) -> None:
        """Load a low-rank adapter (PEFT) from a directory; `replace`: another adapter of the same name is replaced.

        Raises:
            InvalidRequest: if the name is taken, or the adapter cannot be served.
        """
        self._wait(self._client.adapters.load(name, path, replace))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its running requests still finish. Raises InvalidRequest if the adapter is unknown."""
        if self._wait(self._client.adapters.unload(name)) is None:
            raise self._unknown(name)

    def namespace(self, adapter: str | None) -> Namespace:
        """The namespace of requests with an adapter, for a `Submission`. Raises InvalidRequest if it is unknown."""
        if adapter is None:
            return Namespace()
        if (found := self._client.adapters.named(adapter, self.info.name)) is None:
            raise self._unknown(adapter)
        return Namespace(adapter=found.digest)

    def _unknown(self, adapter: str) -> InvalidRequest:
        nearest = self._client.adapters.nearest(adapter, self.info.name)
        return InvalidRequest(f"there is no adapter {adapter!r}{nearest}", param="adapter", code="adapter_not_found")

    def call(self, call: EngineCall[A]) -> A:
        """The answer to an operator's call. Raises RametError if the engine refuses it."""
        return self._wait(self._client.call(call))

    def flush_cache(self) -> Flushed:
        """Drop the cached pages that no live request uses."""
        return self.call(FlushCache())

    def state(self) -> State:
        """Counters and gauges of the engine."""
        return self.call(GetState())

    def close(self) -> None:
        """End the engine; open requests end with EngineDead."""
        if self._thread.is_alive():
            self._wait(self._client.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the client's thread. Raises EngineDead after `close`."""
        if not self._thread.is_alive():
            work.close()
            raise EngineDead("the engine was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted

    async def _pump(self, submissions: list[Submission], put: Callable[[Output], None]) -> None:
        with await self._client.open(submissions) as outputs:
            async for output in outputs:
                put(output)

    async def _collect(self, submissions: list[Submission]) -> list[Output]:
        last: dict[tuple[int, int], Output] = {}
        with await self._client.open(submissions) as outputs:
            async for output in outputs:
                key = output.index, output.choice
                if before := last.get(key):
                    output.logprobs = _appended(before.logprobs, output.logprobs)
                    output.prompt_logprobs = _appended(before.prompt_logprobs, output.prompt_logprobs)
                last[key] = output
        return [last[key] for key in sorted(last)]


def make_submissions(
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] = None,
    reuse: Reuse = None,
    **more: Any,
) -> list[Submission]:
    """The submissions of prompts; `more`: further fields of each."""
    several, _ = prompts_of(prompts)
    if isinstance(sampling, SamplingParams | dict) or sampling is None:
        sampling = [sampling] * len(several)
    if len(sampling) != len(several):
        raise ValueError(f"{len(several)} prompts, but {len(sampling)} sampling parameters")
    if isinstance(reuse, dict):
        reuse = REUSE_BY_METHOD.get(str(reuse.get("method")), UNKNOWN_REUSE)(**reuse)
    return [Submission(p, _sampling(s), reuse=reuse, **more) for p, s in zip(several, sampling, strict=True)]


def _appended(first: Logprobs, later: Logprobs) -> Logprobs:
    """Both lists in the first one, which grows."""
    if first is None:
        return later
    first += later or ()
    return first


def _sampling(value: Sampling) -> SamplingParams:
    return value if isinstance(value, SamplingParams) else SamplingParams.model_validate(value or {})

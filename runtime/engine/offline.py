"""Ramet as a library: the engine core runs in a thread of this process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from radix import Namespace
from runtime.config import DEFAULT_MODEL, Config, make_config
from runtime.engine.core import EngineCore
from runtime.errors import EngineDead, InvalidRequest, RametError
from runtime.frontend.adapters import Adapters
from runtime.frontend.output import Output, Prompt, Submission, prompts_of
from runtime.frontend.processor import Frontend
from runtime.models.resolve import resolve_model
from runtime.models.tokenizer import Tokenizer
from runtime.params import AnyReuse, ReasoningParams, ReuseParams, SamplingParams
from runtime.protocol import Call, FlushCache, GetState, Inbound, Reply, Shutdown, StepEvents
from runtime.reuse.fusion.plan import Planner
from runtime.reuse.modules.schema import Mode, Schema
from runtime.sampling.grammar import check_grammar

Sampling = SamplingParams | dict[str, Any] | None
Reuse = AnyReuse | dict[str, Any] | None


class Engine:
    """Generates without a server.

    >>> engine = Engine()
    >>> engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})[0].text

    Use it as a context manager, or call `close`.
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
        path = resolve_model(self.config.model)
        self.core = EngineCore(self.config, path)
        self.info = self.core.info
        self.tokenizer = Tokenizer.load(path, self.config.model.chat_template)
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._lock = threading.Lock()
        cache, limits = self.config.cache, self.config.scheduler
        planner = Planner.load(cache.document_reuse, path)
        self._frontend = Frontend(
            self.info, self.tokenizer, self._inbox.put, limits, False, planner, cache.reasoning_cache
        )
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._calls = 0
        self._dead: EngineDead | None = None
        self._end = EngineDead("the engine was closed")
        self._thread = threading.Thread(target=self._run, name="ramet-engine", daemon=True)
        self.core.executor.on_death(self._die)
        self._thread.start()
        self._adapters = Adapters(self._answer, self.config.model)
        # One at a time, and on a loop of its own: the caller's may be running.
        self._operator = ThreadPoolExecutor(1)
        try:
            self._operate(self._adapters.open())
        except BaseException:
            self.close()
            raise

    def schema(self, pml: str, mode: Mode = "independent", scaffolds: Sequence[Sequence[str]] | None = None) -> Schema:
        """A schema of prompt modules; its `compile` makes prompts for `generate`. Raises InvalidRequest."""
        return Schema.read(pml, self.tokenizer, self.info.context_length, mode, scaffolds)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = None,
        reuse: Reuse = None,
        adapter: str | None = None,
    ) -> list[Output]:
        """Complete prompts; returns the last Output of each completion, by prompt, then by choice.

        Args:
            prompts: text, token ids, `Segments` with documents or prompts of a `schema`, one or several.
            sampling: parameters for all prompts, or for each; `SamplingParams` or their fields as a dict.
            reuse: of the documents in the prompts, or of reasoning steps; `ReuseParams`, `ReasoningParams` or their
                fields; default: `document_reuse` or `reasoning_cache`.
            adapter: of `lora` or `load_adapter`, as `ADAPTER` or `MODEL:ADAPTER`; None: the model itself.

        Raises:
            InvalidRequest: if a prompt can never be served, or for an unknown adapter; then none is.
            RametError: if a completion fails.
        """
        last: dict[tuple[int, int], Output] = {}
        for output in self.stream_all(make_submissions(prompts, sampling, reuse, self.namespace(adapter))):
            last[output.index, output.choice] = output
        return [last[key] for key in sorted(last)]

    def stream(
        self, prompt: Prompt, sampling: Sampling = None, reuse: Reuse = None, adapter: str | None = None
    ) -> Iterator[Output]:
        """Complete one prompt; yields Outputs as tokens are generated. Closing the iterator aborts the request."""
        return self.stream_all(make_submissions(prompt, sampling, reuse, self.namespace(adapter)))

    def stream_all(self, submissions: list[Submission]) -> Iterator[Output]:
        """Yield the Outputs of several submissions as tokens are generated."""
        outputs: queue.SimpleQueue[Output | RametError] = queue.SimpleQueue()
        open_count = self._submit(submissions, outputs.put)
        try:
            while open_count:
                output = outputs.get()
                if isinstance(output, RametError):
                    raise output
                open_count -= output.finish is not None
                yield output
        finally:
            self._drop(submissions)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = None,
        reuse: Reuse = None,
        adapter: str | None = None,
    ) -> list[Output]:
        last: dict[tuple[int, int], Output] = {}
        async for output in self.astream_all(make_submissions(prompts, sampling, reuse, self.namespace(adapter))):
            last[output.index, output.choice] = output
        return [last[key] for key in sorted(last)]

    async def astream(
        self, prompt: Prompt, sampling: Sampling = None, reuse: Reuse = None, adapter: str | None = None
    ) -> AsyncIterator[Output]:
        """`stream`, without blocking the event loop."""
        async for output in self.astream_all(make_submissions(prompt, sampling, reuse, self.namespace(adapter))):
            yield output

    async def astream_all(self, submissions: list[Submission]) -> AsyncIterator[Output]:
        """`stream_all`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output | RametError] = asyncio.Queue()

        def on_output(output: Output | RametError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        open_count = await asyncio.to_thread(self._submit, submissions, on_output)
        try:
            while open_count:
                output = await outputs.get()
                if isinstance(output, RametError):
                    raise output
                open_count -= output.finish is not None
                yield output
        finally:
            self._drop(submissions)

    def load_adapter(self, name: str, path: str, replace: bool = False) -> None:
        """Load a low-rank adapter (PEFT) from a directory, if asked for in place of the one that has the name.

        Raises:
            InvalidRequest: for a name that is not free, or an adapter that cannot be served.
        """
        self._operate(self._adapters.load(name, path, replace))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it end with it. Raises InvalidRequest for an unknown one."""
        if self._operate(self._adapters.unload(name)) is None:
            raise self._unknown(name)

    def namespace(self, adapter: str | None) -> Namespace:
        """The namespace of requests with an adapter, for a `Submission`. Raises InvalidRequest for an unknown one."""
        if adapter is None:
            return Namespace()
        if (found := self._adapters.named(adapter, self.info.name)) is None:
            raise self._unknown(adapter)
        return Namespace(adapter=found.digest)

    def _unknown(self, adapter: str) -> InvalidRequest:
        nearest = self._adapters.nearest(adapter, self.info.name)
        return InvalidRequest(f"there is no adapter {adapter!r}{nearest}", param="adapter", code="adapter_not_found")

    def flush_cache(self) -> dict[str, int]:
        """Drop the cached pages that no live request uses; returns flushed_tokens and live_tokens."""
        return self._call(FlushCache)

    def state(self) -> dict[str, Any]:
        """Counters and gauges of the engine."""
        return self._call(GetState)

    def close(self) -> None:
        """End the engine; open requests end with EngineDead."""
        self._inbox.put(Shutdown())
        self._thread.join()
        self._operator.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, submissions: list[Submission], on_output: Callable[[Output | RametError], None]) -> int:
        encoded = [self._frontend.encode(submission) for submission in submissions]
        for submission in submissions:
            check_grammar(submission.sampling)
        done: list[Submission] = []
        with self._lock:
            if self._dead is not None:
                raise self._dead
            try:
                for index, (submission, tokens) in enumerate(zip(submissions, encoded, strict=True)):
                    self._frontend.submit(submission, tokens, index, on_output)
                    done.append(submission)
            except RametError:
                for submission in done:
                    self._frontend.drop(submission)
                raise
        return sum(submission.sampling.n for submission in submissions)

    def _drop(self, submissions: list[Submission]) -> None:
        with self._lock:
            for submission in submissions:
                self._frontend.drop(submission)

    def _operate(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._operator.submit(asyncio.run, work).result()

    async def _answer(self, make: Callable[[int], Call]) -> dict[str, Any]:
        return self._call(make)

    def _call(self, make: Callable[[int], Call]) -> dict[str, Any]:
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._calls += 1
            self._replies[self._calls] = answer
            self._inbox.put(make(self._calls))
        if not (found := answer.get()):
            raise self._end
        return found

    def _die(self, error: EngineDead) -> None:
        self._end = error
        self._inbox.put(Shutdown())

    def _run(self) -> None:
        try:
            while True:
                while not self.core.busy or not self._inbox.empty():
                    try:
                        message = self._inbox.get(timeout=self.core.idle_s)
                    except queue.Empty:
                        self.core.publish()
                        continue
                    if isinstance(message, Shutdown):
                        return
                    self._out(self.core.handle(message))
                    self._settle()
                self._out(StepEvents(self.core.step()))
                self._settle()
        except EngineDead as error:
            self._end = error
        finally:
            self.core.close()
            with self._lock:
                self._dead = self._end
                self._frontend.fail_all(self._dead)
                for answer in self._replies.values():
                    answer.put({})

    def _settle(self) -> None:
        for reply in self.core.take_replies():
            self._out(reply)
        self.core.publish()

    def _out(self, message: object) -> None:
        with self._lock:
            if isinstance(message, StepEvents):
                for event in message.events:
                    self._frontend.handle(event)
            elif isinstance(message, Reply):
                self._replies.pop(message.call).put(message.result)


def make_submissions(
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] = None,
    reuse: Reuse = None,
    namespace: Namespace = Namespace(),
) -> list[Submission]:
    several, _ = prompts_of(prompts)
    if isinstance(sampling, SamplingParams | dict) or sampling is None:
        sampling = [sampling] * len(several)
    if len(sampling) != len(several):
        raise ValueError(f"{len(several)} prompts, but {len(sampling)} sampling parameters")
    if isinstance(reuse, dict):
        reuse = ReasoningParams(**reuse) if reuse.get("method") == "reasoncache" else ReuseParams(**reuse)
    return [
        Submission(p, _sampling(s), namespace=namespace, reuse=reuse) for p, s in zip(several, sampling, strict=True)
    ]


def _sampling(value: Sampling) -> SamplingParams:
    return SamplingParams(**(value or {})) if not isinstance(value, SamplingParams) else value

"""AsyncEngine: an engine as the server sees it."""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from radix import Namespace
from radix.node import TOKEN_BYTES
from runtime import calls
from runtime.asks import REUSE_BY_METHOD
from runtime.calls import EngineCall, Erased, PinView, TreeRun
from runtime.config import Config
from runtime.errors import EngineDead, RametError
from runtime.frontend.adapters import Adapters
from runtime.frontend.connection import EngineConnection, EngineProcess, Host
from runtime.frontend.deadline import NO_DEADLINE, Deadline
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Encoded, Output, PartedPrompt, Submission, expected_tokens
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.pictures import Sight
from runtime.frontend.preparer import OpenPreparers, Preparer, ServedModel, no_preparers
from runtime.frontend.stream import OutputStream
from runtime.frontend.text_work import TextWork
from runtime.frontend.watchdog import Watchdog
from runtime.models.resolve import resolve_model
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import ModelInfo, Shutdown

log = logging.getLogger("ramet.client")
_STOP_SECONDS = 10

T = TypeVar("T")
A = TypeVar("A")


class AsyncEngine:
    """Starts an engine, tokenizes, submits, detokenizes and streams. Used from one event loop.

    Attributes:
        config: the whole configuration.
        info: the loaded model; set by `start`.
        tokenizer: the model's tokenizer; set by `start`.
        paused: whether the engine is paused.
        adapters: the loaded adapters.
        sight: how the model sees images; None: it does not. Set by `start`.
    """

    config: Config
    info: ModelInfo
    tokenizer: Tokenizer

    def __init__(
        self,
        config: Config,
        quotas: Mapping[str, int] | None = None,
        host: Host | None = None,
        open_preparers: OpenPreparers = no_preparers,
    ):
        """Make an engine that is not started.

        Args:
            config: the whole configuration.
            quotas: most cached pages by account, in place of `--tenant-quota`.
            host: None: an `EngineProcess`.
            open_preparers: opens what features do to submissions.
        """
        self.config = config
        self.paused = False
        self.sight: Sight | None = None
        self._open_preparers = open_preparers
        self._preparers: list[Preparer] = []
        self.adapters = Adapters(self.call, config.model)
        self._host = host or EngineProcess(config, quotas or {})
        self._connection = EngineConnection(self._host)
        self._frontend: OutputProcessor | None = None
        self._dead = asyncio.Event()
        self._walking = asyncio.Lock()
        self._stopping = False
        self._work = TextWork()
        self._preparing: dict[asyncio.Task[None], str] = {}  # with their accounts
        self._supervisor: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(config.engine.step_timeout)

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises ModelError if the model cannot be loaded."""
        try:
            path = await self._load()
            self.info = await self._connection.open(path)
            await self._open_features(path)
            reuse = self.config.cache.reuse
            default = REUSE_BY_METHOD[reuse].model_validate({"method": reuse}).ask()
            # Where the option is not given, the device decides.
            limits = self.config.scheduler.model_copy(update={"max_running": self.info.max_running})
            inputs = InputProcessor(self.info, self.tokenizer, limits, self._preparers, default)
            self._frontend = OutputProcessor(inputs, self._host.send)
            self._connection.on_events = self._frontend.take
            self._supervisor = asyncio.create_task(self._supervise())
            await self.adapters.open()
        except BaseException:
            await self.stop()
            raise

    async def _load(self) -> Path:
        """Load the tokenizer; returns the model's directory. Raises ModelError if there is no such model."""
        path = await asyncio.to_thread(resolve_model, self.config.model)
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, path, self.config.model.chat_template)
        return path

    async def _open_features(self, path: Path) -> None:
        """Open what features do to submissions; sets `sight`. Raises ModelError."""
        served = ServedModel(self.config, path, self.tokenizer, self.info)
        self._preparers = await asyncio.to_thread(self._open_preparers, served)
        self.sight = next((one.sight for one in self._preparers if one.sight is not None), None)

    async def _supervise(self) -> None:
        """Wait for the engine's end; if the engine was not stopped, fail all open requests."""
        assert self._connection.ended is not None
        watch = asyncio.create_task(self._watchdog.watch(lambda: self.call(calls.Ping()), self._host.kill))
        try:
            code = await asyncio.shield(self._connection.ended)
        finally:
            watch.cancel()
        if self._stopping:
            return
        log.error("the engine process ended with code %s", code)
        self._fail(self._host.error or EngineDead("the engine process died; this request is lost"))
        self._dead.set()

    def kill(self) -> None:
        """End the engine and all open requests at once."""
        self._stopping = True
        self.give_up()
        self._host.kill()

    def give_up(self, why: str = "the server is shutting down") -> None:
        """End open requests with EngineDead, without waiting for the engine."""
        self._fail(EngineDead(why))

    async def stop(self) -> None:
        """End the engine; open requests end with EngineDead."""
        self._stopping = True
        self.give_up()
        self._stop_preparing(None)
        if (ended := self._connection.ended) is not None:
            self._host.send(Shutdown())
            try:
                await asyncio.wait_for(asyncio.shield(ended), _STOP_SECONDS)
            except TimeoutError:
                log.error("the engine does not end and is killed")
                self._dead.set()
                self._host.kill()
                await ended
        self._host.close()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._work.close()
        for preparer in self._preparers:
            preparer.close()

    def _fail(self, error: EngineDead) -> None:
        frontend, self._frontend = self._frontend, None
        if frontend is not None:
            frontend.fail_all(error)
        self._connection.fail(error)

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._frontend is not None

    @property
    def late(self) -> bool:
        """Whether the current step has taken longer than --step-timeout."""
        return self._watchdog.late

    async def wait_dead(self) -> None:
        """Return when the engine has died without being stopped, or had to be killed when it was."""
        await self._dead.wait()

    # -- use -------------------------------------------------------------------------------------------------

    async def open(self, submissions: list[Submission], deadline: Deadline = NO_DEADLINE) -> OutputStream:
        """Submit prompts. Closing the returned stream (a context manager) aborts unfinished completions.

        Args:
            deadline: then, unfinished completions are aborted, and reading raises DeadlineExceeded.

        Raises:
            InvalidRequest: if one of the prompts can never be served; then no prompt is submitted.
            Overloaded, RateLimited: if the prompts exceed the limits on open requests.
            DeadlineExceeded: if tokenizing took longer than until then.
            EngineDead: if the engine is not running.
        """
        frontend, account = self._running(), submissions[0].account
        wanted, expected = sum(s.sampling.n for s in submissions), sum(s.expected_tokens for s in submissions)
        with frontend.admit(account, wanted, expected):
            encoded = await deadline.keep(self._encode(frontend, submissions))
        frontend = self._running()
        stream = OutputStream(frontend, partial(self._work.run, account))
        if deadline.at_s is not None:
            stream.timer = asyncio.get_running_loop().call_at(deadline.at_s, stream.expire, deadline.error)
        try:
            for submission in encoded:
                frontend.submit(submission, stream)
        except RametError:
            stream.close()
            raise
        return stream

    async def _encode(self, frontend: OutputProcessor, submissions: list[Submission]) -> list[Encoded]:
        encoded: list[Encoded] = []
        tokens = 0
        for submission in submissions:
            before = encoded[-1] if encoded else None
            encoded.append(await self._work.encode(frontend.inputs, submission, before))
            tokens += len(encoded[-1].tokens) // TOKEN_BYTES
            if before is not None:  # what is stored may be in many prompts of a short body
                frontend.check_batch(submission.account, tokens)
        return encoded

    def prepare(self, answered: Encoded, output: Output, render: Callable[[], str | None]) -> None:
        """Have the next turn of a conversation computed while the engine is idle.

        Args:
            answered: the submission of a text, and `output` its last Output.
            output: see above.
            render: returns the conversation with the answer, up to the next message's text, or None if there is no
                such text; called in a thread.
        """
        task = asyncio.create_task(self._prepare(answered, output, render))
        self._preparing[task] = answered.account
        task.add_done_callback(self._preparing.pop)

    async def _prepare(self, answered: Encoded, output: Output, render: Callable[[], str | None]) -> None:
        account, said = answered.account, answered.said
        if answered.images:  # the text alone does not have them
            return
        with contextlib.suppress(RametError, ValueError):  # a client could not send the answer back either
            text = await self._work.run(account, render)
            shown = said and said.prompt + self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
            if text is None or (shown and text.startswith(shown)):  # its KV is in the tree already
                return
            turn = Submission(
                text,
                SamplingParams(max_new_tokens=0),
                account=account,
                namespace=answered.namespace,
                add_special_tokens=answered.add_special_tokens,
                replay=answered.replay,
            )
            tokens = (await self._work.encode(self._running().inputs, turn)).tokens
            await self.call(calls.ComputeNextTurn(tokens, answered.namespace, account, answered.hold_s))

    def _stop_preparing(self, account: str | None) -> None:
        for task in [task for task, owner in self._preparing.items() if account in (None, owner)]:
            task.cancel()

    @property
    def num_open(self) -> int:
        return self._frontend.num_open if self._frontend is not None else 0

    async def tokenize(self, account: str, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of texts. Raises InvalidRequest if they cannot fit in the context, Overloaded or RateLimited."""
        frontend = self._running()
        frontend.inputs.check_text(sum(map(len, texts)), "prompt")
        encode = self.tokenizer.encode
        with frontend.admit(account, 1, expected_tokens(sum(map(len, texts)))):
            return await self._work.each(account, lambda text: encode(text, add_special_tokens), texts)

    async def in_turn(self, account: str, characters: int, work: Callable[[], T]) -> T:
        """Do work on `characters` characters of an account's text, in turn. Raises Overloaded, RateLimited."""
        with self._running().admit(account, 1, expected_tokens(characters)):
            return await self._work.run(account, work)

    async def detokenize(self, account: str, several: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Texts of token ids. Raises InvalidRequest for ids that the model does not have, Overloaded or RateLimited."""
        frontend, decode = self._running(), self.tokenizer.decode

        def text(ids: list[int]) -> str:
            frontend.inputs.check_ids(ids, "tokens")
            return decode(ids, skip_special_tokens)

        with frontend.admit(account, 1, sum(map(len, several))):
            return await self._work.each(account, text, several)

    def abort(self, rid: str | None) -> int:
        """Abort the submissions with an id, or all (None); returns their number. Finish type: "abort"."""
        return self._running().abort(rid)

    # -- operators -------------------------------------------------------------------------------------------

    async def call(self, call: EngineCall[A]) -> A:
        """The answer to an operator's call. Raises RametError if the engine refuses it."""
        answer = await self._connection.call(call)
        if isinstance(call, calls.Pause):
            self.paused = call.paused
        return answer

    async def erase(self, account: str) -> Erased:
        """Erase all that is kept of an account, except live requests; returns the answer to `EraseTenant`."""
        for preparer in self._preparers:
            preparer.erase(account)
        self._stop_preparing(account)
        self._running().inputs.replay.erase(account)
        return await self.call(calls.EraseTenant(account))

    async def pin(self, prefix: Submission, name: str | None, ttl_s: float | None) -> PinView:
        """Pin the whole pages of a prefix, which is computed first if necessary; returns a description of the pin.

        Raises:
            InvalidRequest: if the prefix can never be served.
            PinRefused: if the pin exceeds the budget, or the cache is too busy to keep the computed KV.
            Overloaded, RateLimited: if the prefix exceeds the limits on open requests.
        """
        frontend, space, account = self._running(), prefix.namespace, prefix.account
        with frontend.admit(account, 1, prefix.expected_tokens):
            tokens = (await self._work.encode(frontend.inputs, prefix)).tokens
            (pin,) = await self.call(calls.AddPin(tokens, space, account, name, ttl_s))
        return pin

    async def pin_entries(self, encoded: Encoded, name: str, ttl_s: float | None) -> list[str]:
        """Pin the KV of all parts that a served submission has read; returns the ids of the pins.

        Raises:
            PinRefused: if the pins exceed the budget, or the cache is too busy to keep the KV.
            Overloaded, RateLimited: if the prompt exceeds the limits on open requests.
        """
        prompt, space, account = encoded.prompt, encoded.namespace, encoded.account
        assert isinstance(prompt, PartedPrompt)
        with self._running().admit(account, 1, prompt.length):
            pins = await self.call(calls.AddPin(encoded.tokens, space, account, name, ttl_s, prompt.ask))
        return [pin.id for pin in pins]

    async def cached(self, prompt: PartedPrompt, namespace: Namespace) -> dict[str, int]:
        """Number of cached tokens of each part that a prompt reads, by name."""
        return await self.call(calls.GetCached(prompt.ask, namespace, array("i", prompt.tokens).tobytes()))

    async def runs(self, tenant: str | None, salt: str | None) -> AsyncGenerator[list[TreeRun], None]:
        """The tree's nodes of a tenant and a salt (None: all), with their tokens, in slices, parents first."""
        async with self._walking:  # the engine has one walk at a time
            found = await self.call(calls.GetRuns(tenant, salt, anew=True))
            while found is not None:
                yield found
                found = await self.call(calls.GetRuns(tenant, salt, anew=False))

    def _running(self) -> OutputProcessor:
        if self._frontend is None:
            raise self._connection.dead or EngineDead("the engine is not running")
        return self._frontend

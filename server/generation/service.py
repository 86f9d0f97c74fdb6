"""Submits requests to the engine, records their Outputs, and writes the answers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from asyncio import to_thread
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, ClassVar

from fastapi import Request, Response
from msgspec.structs import replace

from runtime.errors import InvalidRequest, RametError
from runtime.frontend.deadline import Deadline
from runtime.frontend.output import Encoded, Output, Submission
from runtime.frontend.stream import InTurn, OutputStream
from runtime.protocol import ModelInfo
from server.explain.answers import Answers
from server.explain.reason import Explanation
from server.explain.report import MakeConversation, MissReport, plain_text
from server.generation.bodies import GenerationBody, naming
from server.generation.receipts import receipt_of
from server.http.answers import JsonAnswer, JsonObject, write_logprobs
from server.http.context import Context, provided
from server.http.sse import Events, EventStream, while_there
from server.telemetry.journal import Journal
from server.telemetry.metrics import Metrics


class Generation:
    """The completions of one request while they are generated.

    Attributes:
        outputs: the Outputs of all completions.
    """

    def __init__(
        self,
        outputs: OutputStream,
        metrics: Metrics,
        journal: Journal,
        report: MissReport | None = None,
        receipts_of: ModelInfo | None = None,
        prepare: Callable[[Output], None] | None = None,
    ):
        """`report`: explains misses; `receipts_of`: the model, for receipts. None: the request wants none.

        `prepare`: called with the last Output of each completion.
        """
        self.outputs = outputs
        self._receipts_of = receipts_of
        self._ended: list[Output] = []
        self._metrics = metrics
        self._journal = journal
        self._report = report
        self._prepare = prepare

    async def collect(self, write: Callable[[Output], None] | None = None) -> list[Output]:
        """The last Output of every completion, sorted by prompt and choice; `write` receives log-probabilities."""
        done: dict[tuple[int, int], Output] = {}
        with self.outputs, self._recorded() as record:
            async for output in self.outputs:
                record(output)
                if write is not None:
                    await write_logprobs(self.outputs, write, output)
                done[output.index, output.choice] = output
        return [done[key] for key in sorted(done)]

    async def events(self, writer: Writer) -> Events:
        """The events of a stream. A failure becomes the writer's own event, or is raised if the writer has none."""
        try:
            for event in writer.begin():
                yield event
            with self._recorded() as record:
                async for output in self.outputs:
                    record(output)
                    if output.logprobs or output.prompt_logprobs:
                        await write_logprobs(self.outputs, writer.add_logprobs, output)
                    why = await self.explain(output) if self._report and writer.explains(output) else None
                    events = writer.write(output, why)
                    if output.finish is not None:
                        events = list(events)
                        await writer.keep(self.outputs.in_turn)
                        if self._receipts_of is not None:
                            events[-1] = events[-1] | await self._receipts([output])
                    for event in events:
                        yield event
            for event in writer.end():
                yield event
        except RametError as error:
            if (failure := writer.fail(error)) is None:
                raise
            yield failure

    async def explain(self, output: Output) -> Explanation | None:
        """Why the prompt missed the cache; None if the request did not ask, or for a further choice of the prompt."""
        if self._report is None or output.choice:
            return None
        return await self._report.explain(self.outputs, output)

    async def respond(self, request: Request, writer: Writer, stream: bool) -> Response:
        """A stream of events or the whole answer. Disconnecting cancels the request."""
        if stream:
            return writer.STREAM(self.events(writer), self.outputs.close, writer.idle)
        answer = await while_there(request, writer.answer(self))
        if self._receipts_of is not None:
            ended = sorted(self._ended, key=lambda output: (output.index, output.choice))
            if isinstance(answer, list):
                answer = [one | await self._receipts([output]) for one, output in zip(answer, ended, strict=True)]
            else:
                answer |= await self._receipts(ended)
        return JsonAnswer(answer)

    async def _receipts(self, outputs: list[Output]) -> JsonObject:
        """The field `receipt`: an object, or a list of them for several outputs."""
        info, submissions = self._receipts_of, self.outputs.submissions
        assert info is not None
        made = [await to_thread(receipt_of, submissions[output.index], output, info) for output in outputs]
        return {"receipt": made if len(made) > 1 else made[0]}

    @contextmanager
    def _recorded(self) -> Iterator[Callable[[Output], None]]:
        """Yields a function that records Outputs. Completions that have not ended at the exit count as failed."""
        outputs = self.outputs
        last: dict[tuple[int, int], Output] = {}
        unended = {(index, choice) for index, one in enumerate(outputs.submissions) for choice in range(one.sampling.n)}
        failure: RametError | None = None
        began = time.monotonic()

        def record(output: Output) -> None:
            key = (output.index, output.choice)
            before = last.get(key)
            self._metrics.observe(output, None if before is None else before.e2e_s)
            if output.finish is not None:
                self._ended.append(output)
                unended.discard(key)
                self._journal.add(outputs.submissions[output.index], output)
                if self._prepare is not None:
                    self._prepare(output)
            if output.new_token_ids:  # an Output without tokens only reports the prompt, or tokens that may change
                last[key] = output

        try:
            yield record
        except RametError as error:
            failure = error
            raise
        finally:
            for key in sorted(unended):
                seconds = time.monotonic() - began
                self._journal.add_failed(outputs.submissions[key[0]], last.get(key), seconds, failure)


class Writer(ABC):
    """Writes one answer in the form of an API. Each API has a subclass.

    Attributes:
        STREAM: the class of a streamed response.
    """

    STREAM: ClassVar[type[EventStream]] = EventStream

    def begin(self) -> Iterable[JsonObject]:
        """Events before the first Output."""
        return ()

    def idle(self) -> Iterable[JsonObject]:
        """Events of a stream that has had no other event for a while, for clients that ignore comments."""
        return ()

    def add_logprobs(self, output: Output) -> None:  # noqa: B027 (some APIs have none)
        """Store an Output's log-probabilities for the next event or the answer. May run in a thread."""

    def explains(self, output: Output) -> bool:
        """Whether the events of this Output explain the cache miss."""
        return output.finish is not None

    @abstractmethod
    def write(self, output: Output, why: Explanation | None) -> Iterable[JsonObject]:
        """The events of an Output; `why`: the explanation of the cache miss, if these events must have it."""

    async def keep(self, in_turn: InTurn) -> None:  # noqa: B027 (most APIs keep nothing)
        """Keep a written answer, before the client gets the events of its end. `in_turn`: see `OutputStream`."""

    def end(self) -> Iterable[JsonObject]:
        """Events behind the last Output."""
        return ()

    def fail(self, error: RametError) -> JsonObject | None:
        """The last event of a failed stream; None: the error event that all APIs share."""
        return None

    @abstractmethod
    async def answer(self, generation: Generation) -> JsonObject | list[JsonObject]:
        """The whole answer."""


class GenerationService:
    """Submits requests to the engine, and records them in metrics, journal and `Answers`."""

    def __init__(self, context: Context, metrics: Metrics, journal: Journal, answers: Answers):
        self.context = context
        self._metrics = metrics
        self._journal = journal
        self._answers = answers

    async def submit(
        self,
        request: Request,
        body: GenerationBody,
        submissions: list[Submission],
        conversation: MakeConversation = plain_text,
        answer: str | None = None,
        following: Callable[[Encoded, Output], str | None] | None = None,
    ) -> Generation:
        """Submit a request's prompts. Errors name the request's fields.

        Args:
            conversation: makes the conversation of a single submission, to explain misses.
            answer: the answer's id for later comparisons; needed unless it ends with the submission's `rid`.
            following: renders the conversation behind the answer to a submission, see `AsyncEngine.prepare`; None:
                there is none.

        Raises:
            RametError: see `run`.
        """
        report = None
        if body.explain or body.earlier is not None:
            tokenizer = self.context.engine.tokenizer
            report = MissReport(tokenizer, self._answers, submissions[0].account, body.earlier, conversation)
            submissions = [replace(submission, explain=True) for submission in submissions]
        most_s = self.context.config.cache.most_hold_s
        if (body.cache.hold_s or 0) > most_s:
            raise InvalidRequest(f"this server holds prefixes for {most_s:g} s at most", param="cache.hold_s")
        outputs = await self._open(request, submissions, body.names, body.deadline(self.context))
        first = outputs.submissions[0]
        for submission in outputs.submissions:
            self._answers.add(submission, answer if submission is first else None)
        receipts_of = self.context.engine.info if body.receipt else None
        prepare, is_wanted = None, self.context.config.scheduler.next_turn_tokens and first.store
        if following is not None and is_wanted and first.sampling.n == 1:
            prepare = partial(self._prepare, first, following)
        return Generation(outputs, self._metrics, self._journal, report, receipts_of, prepare)

    def _prepare(self, submission: Encoded, following: Callable[[Encoded, Output], str | None], output: Output) -> None:
        """Prepare the next turn, unless others are served, who would pay for its text."""
        finish, engine = output.finish, self.context.engine
        if output.completion_tokens and finish and finish.type in ("stop", "length") and not engine.num_open:
            engine.prepare(submission, output, partial(following, submission, output))

    async def run(
        self,
        request: Request,
        submission: Submission,
        names: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Encoded, Output]:
        """Run a prompt whose answer the client does not see; returns it with its last Output.

        Args:
            names: as `GenerationBody.NAMES`.

        Raises:
            RametError: as `AsyncEngine.open`; Overloaded while the server stops; ClientGone.
        """
        outputs = await self._open(request, [submission], names or {}, Deadline.after(timeout_s))
        (done,) = await while_there(request, Generation(outputs, self._metrics, self._journal).collect())
        return outputs.submissions[0], done

    def erase(self, account: str) -> None:
        """Erase an account's prompts and records. Raises BadTrace."""
        self._answers.erase(account)
        self._journal.erase(account)

    async def _open(
        self,
        request: Request,
        submissions: list[Submission],
        names: Mapping[str, str],
        deadline: Deadline,
    ) -> OutputStream:
        self.context.shutdown.check()
        began = time.monotonic()
        try:
            with naming(names):
                return await while_there(request, self.context.engine.open(submissions, deadline))
        except RametError as error:
            for submission in submissions:
                self._journal.add_failed(submission, None, time.monotonic() - began, error)
            raise


Service = Annotated[GenerationService, provided(GenerationService)]

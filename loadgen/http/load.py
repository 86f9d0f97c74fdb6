"""Sends sessions when the arrival process says so, within bounds, and records every request."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadgen.http.arrivals import Arrivals, Closed, Gamma
from loadgen.http.client import Client
from loadgen.http.record import Record
from loadgen.http.session import Conversation, Message, Session
from loadgen.http.tokens import TokenCounter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


@dataclass(frozen=True)
class Bounds:
    """Limits of a load.

    Attributes:
        requests: most requests of the run; None: no limit.
        duration_s: seconds after which no request is sent; None: no limit.
        grace_s: seconds for running requests after the duration.
        outstanding: most running requests. Others wait, and the waiting counts as latency.
        failures: consecutive failures that end the run.
    """

    requests: int | None = None
    duration_s: float | None = None
    grace_s: float = 30.0
    outstanding: int = 1024
    failures: int = 50


class Load:
    """One run of requests.

    Attributes:
        begun: number of sessions begun so far.
        records: the records of the requests sent so far.
        ended_by: what ended the run, in words.

    Args:
        scripted: later turns build on the workload's answers instead of the server's.
        counter: counts the tokens that the server does not report.
        ended: called at the end of each request.
    """

    def __init__(
        self,
        client: Client,
        sessions: Iterator[Session],
        arrivals: Arrivals,
        bounds: Bounds,
        rng: random.Random,
        scripted: bool = False,
        counter: TokenCounter | None = None,
        ended: Callable[[Record], object] = lambda record: None,
    ):
        self._client = client
        self._sessions = sessions
        self._arrivals = arrivals
        self._bounds = bounds
        self._rng = rng
        self._scripted = scripted
        self._counter = counter
        self._ended = ended
        self._uncounted: list[tuple[Record, str, str]] = []
        self._taken = 0
        self.begun = 0
        self._failures = 0
        self.records: list[Record] = []
        self.ended_by = "the workload's end"

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._begin

    async def run(self) -> None:
        """Run to the end. Cancellation records the running requests as unfinished."""
        self._begin = time.perf_counter()
        work = asyncio.create_task(self._closed() if isinstance(self._arrivals, Closed) else self._open())
        limit = self._bounds.duration_s
        try:
            await asyncio.wait((work,), timeout=None if limit is None else limit + self._bounds.grace_s)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
            self._count_tokens()
        if not work.cancelled():
            work.result()

    async def _closed(self) -> None:
        assert isinstance(self._arrivals, Closed)
        async with asyncio.TaskGroup() as users:
            for _ in range(self._arrivals.concurrency):
                users.create_task(self._user())

    async def _user(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._may_send() and (session := self._next_session()) is not None:
            if await self._session(session, None):
                pause_s = _FIRST_PAUSE_S
            else:
                # Do not flood a server that refuses requests at once.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self) -> None:
        times = self._arrivals.times(self._rng) if isinstance(self._arrivals, Gamma) else None
        places = asyncio.Semaphore(self._bounds.outstanding)
        async with asyncio.TaskGroup() as sessions:
            while self._may_send() and (session := self._next_session()) is not None:
                at_s = next(times) if times is not None else session.at_s or 0.0
                if not await self._wait_until(at_s):
                    return
                await places.acquire()
                task = sessions.create_task(self._session(session, at_s))
                task.add_done_callback(lambda _: places.release())

    def _next_session(self) -> Session | None:
        return next(self._sessions, None)

    def _may_send(self) -> bool:
        bounds = self._bounds
        if bounds.duration_s is not None and self.now_s() >= bounds.duration_s:
            self.ended_by = "the duration"
        elif bounds.requests is not None and self._taken >= bounds.requests:
            self.ended_by = "the number of requests"
        elif self._failures >= bounds.failures:
            self.ended_by = f"{self._failures} failures in a row"
        else:
            return True
        return False

    async def _wait_until(self, at_s: float) -> bool:
        """Sleep until a time of the run; False if the run ends before it."""
        limit = self._bounds.duration_s
        if limit is not None and at_s >= limit:
            self.ended_by = "the duration"
            return False
        await asyncio.sleep(at_s - self.now_s())
        return self._may_send()

    async def _session(self, session: Session, scheduled_s: float | None) -> bool:
        """Send the turns until one fails or the run ends; False after a failure."""
        conversation = Conversation(session.dialogue)
        number, self.begun = self.begun, self.begun + 1
        for i, turn in enumerate(session.turns):
            if scheduled_s is not None and not await self._wait_until(scheduled_s):
                return True
            if not self._may_send():
                return True
            conversation.add(turn.messages)
            record = Record(self._taken, number, i, session.group, wanted_tokens=turn.output_tokens)
            record.scheduled_s = self.now_s() if scheduled_s is None else scheduled_s
            self._taken += 1
            self.records.append(record)
            text = await self._send(conversation, record)
            if not record.ok:
                return False
            if i + 1 < len(session.turns):
                said = turn.scripted_answer if self._scripted and turn.scripted_answer is not None else text
                conversation.add([Message.of("assistant", said)])
                scheduled_s = record.end_s + session.turns[i + 1].think_s
        return True

    async def _send(self, conversation: Conversation, record: Record) -> str:
        try:
            text = await self._client.send(conversation, record, self.now_s)
            if self._counter is not None and record.ok and record.counted_by != "server":
                self._uncounted.append((record, conversation.as_text(), text))
            return text
        finally:
            self._failures = 0 if record.ok else self._failures + 1
            self._ended(record)

    def _count_tokens(self) -> None:
        """Count the tokens that the server did not report. Counting during the run would distort its times."""
        if self._counter is None or not self._uncounted:
            return
        prompts = self._counter.count([prompt for _, prompt, _ in self._uncounted])
        outputs = self._counter.count([text for _, _, text in self._uncounted])
        for (record, _, _), prompt, output in zip(self._uncounted, prompts, outputs, strict=True):
            record.prompt_tokens = prompt if record.prompt_tokens is None else record.prompt_tokens
            record.output_tokens, record.counted_by = output, "tokenizer"

"""OutputStream: an asynchronous iterator over the Outputs of submissions."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable

from runtime.errors import RametError
from runtime.frontend.output import Encoded, Output, merge_outputs
from runtime.frontend.output_processor import OutputProcessor

InTurn = Callable[[Callable[[], None]], Awaitable[None]]


class OutputStream:
    """Outputs of submissions, until every completion has finished.

    If the reader is slower than the engine, successive Outputs of a completion are merged. Reading raises RametError,
    such as EngineDead, if a completion fails; an aborted completion ends with an Output.

    Attributes:
        submissions: the submissions, in the order of `Output.index`.
        prompts: prompt tokens by `Output.index`, of submissions with `show_tokens`.
    """

    def __init__(self, frontend: OutputProcessor, in_turn: InTurn = asyncio.to_thread):
        """`in_turn`: runs a function in a thread, for users of the stream."""
        self._frontend = frontend
        self.in_turn = in_turn
        self._ready: deque[Output | RametError] = deque()
        self._news = asyncio.Event()
        self.submissions: list[Encoded] = []
        self.prompts: dict[int, list[int]] = {}
        self._open = 0
        self.timer: asyncio.TimerHandle | None = None

    def add(self, submission: Encoded) -> int:
        """Take note of a submission that `OutputProcessor.submit` has accepted; returns the `index` of its Outputs."""
        index = len(self.submissions)
        if submission.show_tokens:
            tokens = array("i", submission.tokens).tolist()
            self.prompts[index] = submission.images.shown(tokens) if submission.images else tokens
        self.submissions.append(submission)
        self._open += submission.sampling.n
        return index

    def close(self) -> None:
        """Abort unfinished completions."""
        if self.timer is not None:
            self.timer.cancel()
        if self._open:
            for submission in self.submissions:
                self._frontend.drop(submission)

    def expire(self, error: RametError) -> None:
        """Abort unfinished completions; reading raises `error` after the Outputs that have arrived."""
        for submission in self.submissions:
            self._frontend.drop(submission)
        if self._open:
            self.put(error)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        if not self._open:
            raise StopAsyncIteration
        if not self._ready:
            self._news.clear()
            await self._news.wait()
        output = self._ready.popleft()
        if isinstance(output, RametError):
            raise output
        self._open -= output.finish is not None
        return output

    def put(self, item: Output | RametError) -> None:
        """Give the reader an Output, or an error."""
        last = self._ready[-1] if self._ready else None
        if (
            isinstance(item, Output)
            and isinstance(last, Output)
            and (item.index, item.choice) == (last.index, last.choice)
        ):
            self._ready[-1] = merge_outputs(last, item)
        else:
            self._ready.append(item)
        self._news.set()

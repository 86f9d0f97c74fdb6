"""Runs long work of the server's process in threads: text to tokens and back, chat templates."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TypeVar

from runtime.fair_threads import FairThreads
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Encoded, Submission

# Threads for texts; the tokenizer works outside of the interpreter lock.
_THREADS = 3
# Characters or tokens of short texts that are processed together, which takes milliseconds.
_PIECE = 1 << 14

Item = TypeVar("Item", str, list[int])
T = TypeVar("T")


class TextWork:
    """Runs the work of all accounts in a few threads, where accounts take turns.

    Cancelling a task drops queued work.
    """

    def __init__(self) -> None:
        self._texts = FairThreads(_THREADS, "ramet-text")

    async def encode(self, inputs: InputProcessor, submission: Submission, before: Encoded | None = None) -> Encoded:
        """`InputProcessor.encode` in a thread, and `settle`."""
        encoded = await self.run(submission.account, partial(inputs.encode, submission, before))
        return await inputs.settle(encoded)

    async def run(self, account: str, work: Callable[[], T]) -> T:
        """The result of `work`, in a turn of the account."""
        return await self._texts.run(account, work)

    async def each(self, account: str, work: Callable[[Item], T], items: list[Item]) -> list[T]:
        """The results of `work` for texts or lists of tokens; a turn takes one long item, or several short ones."""
        results: list[list[T]] = []
        for piece in _pieces(items):
            results.append(await self.run(account, partial(list, map(work, piece))))
        return list(chain.from_iterable(results))

    def close(self) -> None:
        self._texts.close()


def _pieces(items: list[Item]) -> Iterator[list[Item]]:
    piece: list[Item] = []
    size = 0
    for item in items:
        piece.append(item)
        size += len(item) + 1  # an empty item costs a call, too
        if size >= _PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece

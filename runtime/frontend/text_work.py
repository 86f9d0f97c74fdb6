"""Runs long work of the server's process in threads: text to tokens and back, chat templates, grammars."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TypeVar

from cachetools import LRUCache
from msgspec.structs import replace

from runtime.errors import InvalidRequest
from runtime.frontend.grammar_process import GrammarProcesses
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Encoded, Submission
from runtime.sampling.grammar import COMPILE_TIMEOUT_S
from runtime.sampling.turns import Turns

# Threads for texts; the tokenizer works outside of the interpreter lock.
_THREADS = 3
# Threads that wait for a grammar to be checked.
_GRAMMARS = 2
# Number of checked grammars to remember: agents send the same tools again and again.
_CHECKED = 64
# Characters or tokens of short texts that are processed together, which takes milliseconds.
_PIECE = 1 << 14

Item = TypeVar("Item", str, list[int])
T = TypeVar("T")


class TextWork:
    """Runs the work of all accounts in a few threads, where accounts take turns. Cancelling a task drops queued work.

    Args:
        grammar_timeout_s: time limit for checking one grammar.
    """

    def __init__(self, grammar_timeout_s: float = COMPILE_TIMEOUT_S):
        self._texts = Turns(_THREADS, "ramet-text")
        self._grammars = Turns(_GRAMMARS, "ramet-grammar")
        self._processes = GrammarProcesses(grammar_timeout_s)
        self._checked: LRUCache[tuple[str, str | None, str], bool] = LRUCache(_CHECKED)

    async def encode(self, inputs: InputProcessor, submission: Submission, before: Encoded | None = None) -> Encoded:
        """`InputProcessor.encode` in a thread; also checks the grammar."""
        encoded = await self.run(submission.account, partial(inputs.encode, submission, before))
        if encoded.sampling.constrained and not await self._follows_grammar(encoded) and encoded.otherwise is not None:
            return replace(encoded, sampling=encoded.otherwise, common=encoded.otherwise)
        return encoded

    async def _follows_grammar(self, submission: Encoded) -> bool:
        """Whether a grammar can be followed. Raises InvalidRequest if not, and if the submission has no `otherwise`."""
        account, sampling = submission.account, submission.sampling
        key = account, sampling.constraint, str(getattr(sampling, sampling.constraint or ""))
        follows = self._checked.get(key, False)
        if not follows and (key not in self._checked or submission.otherwise is None):
            try:
                await self._grammars.run(account, partial(self._processes.check, sampling))
                follows = True
            except InvalidRequest:
                if submission.otherwise is None:
                    raise
            self._checked[key] = follows
        return follows

    def erase(self, account: str) -> None:
        """Forget the grammars of an account."""
        for key in [key for key in self._checked if key[0] == account]:
            del self._checked[key]
        self._processes.forget()

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
        self._grammars.close()
        self._processes.close()


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

"""Checks the grammars of submissions in the server's process."""

from functools import partial

from cachetools import LRUCache
from msgspec.structs import replace

from runtime.errors import InvalidRequest
from runtime.fair_threads import FairThreads
from runtime.features.grammars.compiler import COMPILE_TIMEOUT_S
from runtime.features.grammars.process import GrammarProcesses
from runtime.frontend.output import Encoded
from runtime.frontend.preparer import Preparer

# Threads that wait for a grammar to be checked.
_THREADS = 2
# Number of checked grammars to remember: agents send the same tools again and again.
_CHECKED = 64


class GrammarChecks(Preparer):
    """Refuses grammars that cannot be followed, or replaces them by the submission's `otherwise`.

    Args:
        timeout_s: time limit for one grammar.
    """

    def __init__(self, timeout_s: float = COMPILE_TIMEOUT_S):
        self._threads = FairThreads(_THREADS, "ramet-grammar")
        self._processes = GrammarProcesses(timeout_s)
        self._checked: LRUCache[tuple[str, str | None, str], bool] = LRUCache(_CHECKED)

    async def settle(self, submission: Encoded) -> Encoded:
        if not submission.sampling.constrained or await self._follows(submission) or submission.otherwise is None:
            return submission
        return replace(submission, sampling=submission.otherwise, common=submission.otherwise)

    async def _follows(self, submission: Encoded) -> bool:
        """Whether a grammar can be followed. Raises InvalidRequest if not, and if the submission has no `otherwise`."""
        account, sampling = submission.account, submission.sampling
        key = account, sampling.constraint, str(getattr(sampling, sampling.constraint or ""))
        follows = self._checked.get(key, False)
        if not follows and (key not in self._checked or submission.otherwise is None):
            try:
                await self._threads.run(account, partial(self._processes.check, sampling))
                follows = True
            except InvalidRequest:
                if submission.otherwise is None:
                    raise
            self._checked[key] = follows
        return follows

    def erase(self, account: str) -> None:
        for key in [key for key in self._checked if key[0] == account]:
            del self._checked[key]
        self._processes.forget()

    def close(self) -> None:
        self._threads.close()
        self._processes.close()

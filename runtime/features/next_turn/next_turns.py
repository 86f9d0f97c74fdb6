"""Computes the next turns of conversations, as their histories will be rendered, while the engine is idle."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.calls import Answers, ComputeNextTurn
from runtime.engine.core import EngineCore
from runtime.engine.part import Part
from runtime.engine.requests import open_request
from runtime.errors import RametError
from runtime.params import SamplingParams
from runtime.protocol import AddRequest, TokenEvent

# Rows that are computed at once: an arriving request waits for one such step at most.
SLICE = 128
# Most turns that wait; the oldest are dropped.
_MOST = 8
_RID = "(next turn)"


@dataclass(slots=True)
class _Turn:
    """A history to compute.

    Attributes:
        call: the call that brought it.
        done: number of leading tokens that were cached at the last look.
        stop: number of leading tokens to compute, in whole pages; 0: not looked up yet.
    """

    call: ComputeNextTurn
    done: int = -1
    stop: int = 0


class NextTurns(Part):
    """Computes histories slice by slice. A slice is a request without output that lives for one step.

    Args:
        core: the engine.
        most_tokens: most tokens that are computed of a turn.
    """

    def __init__(self, core: EngineCore, most_tokens: int):
        self._core, self._most = core, most_tokens
        self._turns: deque[_Turn] = deque(maxlen=_MOST)

    def answers(self) -> Answers:
        return [ComputeNextTurn.by(self._take)]

    def _take(self, call: ComputeNextTurn) -> None:
        self._turns.append(_Turn(call))
        self._wait()

    def _wait(self) -> None:
        """Be polled in every step while there are turns."""
        self._core.parts.wait(self, bool(self._turns))

    @property
    def busy(self) -> bool:
        return bool(self._turns) and not self._core.paused

    def flush(self) -> None:
        self._turns.clear()
        self._wait()

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        """Add the next slice if no request is live; end a slice that has not ended with its step if others are."""
        core = self._core
        if not self._turns:
            return ()
        if len(core.requests) > 1:
            core.abort(_RID)
        if core.requests or core.paused:
            return ()
        while self._turns and not self._add(self._turns[0]):
            self._turns.popleft()
        if not self._turns:
            self._wait()
        return ()

    def _add(self, turn: _Turn) -> bool:
        """Add a request for the next slice of a turn; False if there is nothing left to compute, or it is in vain."""
        core, page_size, tokens = self._core, self._core.info.page_size, array("i", turn.call.tokens)
        whole = len(tokens) // page_size * page_size
        try:
            done = self._cached(turn, tokens[: turn.stop or whole])
        except RametError:  # it can never be served
            return False
        if not turn.stop:
            # The next turn would compute a last page that is not full beside its own rows for next to nothing.
            turn.stop = min(whole, (done + self._most) // page_size * page_size) if done + page_size < whole else 0
        if done <= turn.done or done >= turn.stop - 1:
            return False
        turn.done = done
        stop = min((done + max(SLICE, page_size)) // page_size * page_size, turn.stop)
        if core.cache.pages_for(stop) > core.cache.num_available:  # only pins could make room
            return False
        return not core.add(self._message(turn, tokens[:stop]))

    def _cached(self, turn: _Turn, tokens: array[int]) -> int:
        """Number of leading tokens that a request would read from the cache, which is never the last one."""
        core = self._core
        message = self._message(turn, tokens)
        request = open_request(message, core.info, core.strategies.serving(message.ask), core.decoding, 0)
        return request.lease.look().tokens

    def _message(self, turn: _Turn, tokens: array[int]) -> AddRequest:
        call, sampling = turn.call, SamplingParams(max_new_tokens=0, temperature=0)
        return AddRequest(
            _RID,
            tokens.tobytes(),
            sampling,
            namespace=call.namespace,
            account=call.account,
            hold_s=call.hold_s,
            idle=True,
        )

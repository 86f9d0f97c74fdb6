"""Operators' calls that are being answered."""

import logging
from collections.abc import Generator, Mapping

from runtime.calls import Call
from runtime.engine.part import Answer, Handler
from runtime.errors import InvalidRequest, RametError
from runtime.protocol import Failure, Reply

log = logging.getLogger("ramet.engine")


class OpenCalls:
    """Operators' calls that are being answered, each by the handlers of one or several parts.

    Attributes:
        open: number of each call, None if it wants no reply, and its unfinished answer.
    """

    def __init__(self) -> None:
        self._handlers: dict[type[Call], list[Handler]] = {}
        self.open: list[tuple[int | None, Generator[None, None, Answer]]] = []

    def learn(self, answers: Mapping[type[Call], Handler]) -> None:
        """Add the handlers of a part: `Part.answers`."""
        for call, handler in answers.items():
            self._handlers.setdefault(call, []).append(handler)

    def ask(self, number: int | None, call: Call) -> None:
        """Begin a call. `replies` returns its reply later, unless `number` is None."""
        self.open.append((number, self._answer(call)))

    def forget(self, number: int) -> None:
        """Cancel a call."""
        for one in [one for one in self.open if one[0] == number]:
            self.open.remove(one)
            one[1].close()

    def replies(self) -> list[Reply]:
        """Advance all calls; returns the replies of those that are done."""
        replies = []
        for one in list(self.open):
            number, answer = one
            reply = _advance(number or 0, answer)
            if reply is not None:
                self.open.remove(one)
                replies += [] if number is None else [reply]
        return replies

    def _answer(self, call: Call) -> Generator[None, None, Answer]:
        handlers = self._handlers.get(type(call))
        if handlers is None:
            raise InvalidRequest(f"this engine does not answer {type(call).__name__}: its prefix cache is off")
        found: Answer = {}
        for handler in handlers:
            answer = handler(call)
            found |= answer if isinstance(answer, dict) else (yield from answer)
        return found


def _advance(number: int, answer: Generator[None, None, Answer]) -> Reply | None:
    """Advance a call; returns its reply, which may be a failure, or None if it takes more steps."""
    try:
        next(answer)
    except StopIteration as end:
        return Reply(number, end.value)
    except RametError as error:
        return Reply(number, {}, Failure.of(error))
    except Exception as error:
        log.exception("a call failed")
        return Reply(number, {}, Failure("RametError", f"the call failed: {type(error).__name__}"))
    return None

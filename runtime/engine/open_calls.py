"""Operators' calls that are being answered."""

import logging
from collections.abc import Generator

import msgspec

from runtime.calls import Answers, EngineCall, Handler
from runtime.errors import InvalidRequest, RametError
from runtime.protocol import Failure, Reply, encode

log = logging.getLogger("ramet.engine")


class OpenCalls:
    """Operators' calls that are being answered.

    Attributes:
        open: number of each call, None if it wants no reply, and its unfinished answer.
    """

    def __init__(self) -> None:
        self._handlers: dict[type[EngineCall[object]], Handler] = {}
        self.open: list[tuple[int | None, Generator[None, None, msgspec.Raw]]] = []

    def learn(self, answers: Answers) -> None:
        """Add the handlers of a part: `Part.answers`."""
        for kind, handler in answers:
            assert kind not in self._handlers, "one part answers a call"
            self._handlers[kind] = handler

    def ask(self, number: int | None, call: EngineCall[object]) -> None:
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
                if number is not None:
                    replies.append(reply)
                elif reply.failure is not None:  # which nobody else is told
                    log.warning("a call of the engine's own failed: %s", reply.failure.message)
        return replies

    def _answer(self, call: EngineCall[object]) -> Generator[None, None, msgspec.Raw]:
        handler = self._handlers.get(type(call))
        if handler is None:
            raise InvalidRequest(f"this engine does not answer {type(call).__name__}: its prefix cache is off")
        answer = handler(call)
        return msgspec.Raw(encode((yield from answer) if isinstance(answer, Generator) else answer))


def _advance(number: int, answer: Generator[None, None, msgspec.Raw]) -> Reply | None:
    """Advance a call; returns its reply, which may be a failure, or None if it takes more steps."""
    try:
        next(answer)
    except StopIteration as end:
        return Reply(number, end.value)
    except RametError as error:
        return Reply(number, failure=Failure.of(error))
    except Exception as error:
        log.exception("a call failed")
        return Reply(number, failure=Failure("RametError", f"the call failed: {type(error).__name__}"))
    return None

"""The parts of an engine, and the operators' calls that they answer."""

import logging
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any

from runtime.batch import ForwardBatch
from runtime.calls import Call
from runtime.errors import InvalidRequest, RametError
from runtime.part import Answer, Handler, Part
from runtime.protocol import Failure, Finish, Reply, TokenEvent
from runtime.request import Request, Work

log = logging.getLogger("ramet.engine")


class Parts:
    """The parts of an engine. For each hook, it has the list of the methods of active parts that define the hook.

    Attributes:
        waiting: active parts that define `busy`.
    """

    def __init__(self, parts: Sequence[Part] = ()):
        self._parts = list(parts)
        self.added: list[Callable[[Request], None]] = self._defined("added")
        self.blocked_on: list[Callable[[Request], Hashable | None]] = self._defined("blocked_on")
        self.poll: list[Callable[[float], Sequence[TokenEvent]]] = self._defined("poll")
        self.scheduled: list[Callable[[list[Work]], None]] = self._defined("scheduled")
        self.launching: list[Callable[[ForwardBatch], None]] = self._defined("launching")
        self.booked: list[Callable[[Sequence[Work], int, float], None]] = self._defined("booked")
        self.prefilled: list[Callable[[Request], None]] = self._defined("prefilled")
        self.ended: list[Callable[[Request, Finish], None]] = self._defined("ended")
        self.flush: list[Callable[[], None]] = self._defined("flush")
        self.settle: list[Callable[[], None]] = self._defined("settle")
        self.waiting = [part for part in self._parts if part.active and type(part).busy is not Part.busy]
        self.idle_s = min((part.idle_s for part in self._parts if part.idle_s is not None), default=None)

    def _defined(self, hook: str) -> list[Any]:
        active = (part for part in self._parts if part.active)
        return [getattr(part, hook) for part in active if getattr(type(part), hook) is not getattr(Part, hook)]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    @property
    def busy(self) -> bool:
        return any(part.busy for part in self.waiting)

    def handlers(self) -> dict[type[Call], list[Handler]]:
        found: dict[type[Call], list[Handler]] = {}
        for part in self._parts:
            for call, handler in part.answers().items():
                found.setdefault(call, []).append(handler)
        return found


class Calls:
    """Operators' calls that are being answered.

    Attributes:
        open: number of each call, None if it wants no reply, and its unfinished answer.
    """

    def __init__(self, handlers: Mapping[type[Call], Sequence[Handler]]):
        self._handlers = handlers
        self.open: list[tuple[int | None, Generator[None, None, Answer]]] = []

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

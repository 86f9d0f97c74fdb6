"""Parts of the engine beside the step: they take part in the lives of requests, and answer operators' calls."""

import logging
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any

from runtime.batch import ForwardBatch
from runtime.calls import Call
from runtime.errors import InvalidRequest, RametError
from runtime.protocol import Failure, Finish, Reply, TokenEvent
from runtime.request import Request, Work

log = logging.getLogger("ramet.engine")

Answer = dict[str, Any]
# A handler whose answer takes several steps returns a generator, which is advanced between steps.
Handler = Callable[[Any], Answer | Generator[None, None, Answer]]


class Part:
    """A part of the engine. The engine calls only the hooks that a part defines.

    Attributes:
        active: whether the engine calls its hooks; `EngineCore.refresh` takes note of a change.
        idle_s: longest time between two calls of `settle`, in seconds; None: no limit.
    """

    active: bool = True
    idle_s: float | None = None

    @property
    def busy(self) -> bool:
        """Whether the part waits for something that only a step can take."""
        return False

    def answers(self) -> Mapping[type[Call], Handler]:
        """The calls that the part answers. If several parts answer one, their answers are joined."""
        return {}

    def added(self, request: Request) -> None:
        """Take note of a new request. Raises RametError to refuse it."""

    def blocked_on(self, request: Request) -> Hashable | None:
        """The event that must come before a request may wait for admission; `Scheduler.wake` is called then."""

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        """Take what has come for blocked requests, or for the part, since the last step, of `step_s` seconds.

        Returns:
            The events of requests that end by it.
        """
        return ()

    def scheduled(self, work: list[Work]) -> None:
        """Change the work of the next step."""

    def launching(self, batch: ForwardBatch) -> None:
        """Prepare the memory that a step writes."""

    def booked(self, work: Sequence[Work], num_rows: int, seconds: float) -> None:
        """Take note of a step that has been read."""

    def prefilled(self, request: Request) -> None:
        """Take note of new rows of a prompt, before any token that they give."""

    def ended(self, request: Request, finish: Finish) -> None:
        """Take note of a request's end."""

    def flush(self) -> None:
        """Drop what depends on cached KV."""

    def settle(self) -> None:
        """Publish what has happened in a step, or in the handling of a message."""

    def state(self) -> Mapping[str, Any]:
        """Counters and gauges for operators."""
        return {}

    def close(self) -> None:
        """Release threads, sockets and files."""


class Parts:
    """The parts of an engine; for each hook, the methods of the parts that define it, in the order of the parts.

    Attributes:
        waiting: parts that may wait for something that only a step can take.
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
        open: their numbers and answers.
    """

    def __init__(self, handlers: Mapping[type[Call], Sequence[Handler]]):
        self._handlers = handlers
        self.open: list[tuple[int | None, Generator[None, None, Answer]]] = []

    def ask(self, number: int | None, call: Call) -> None:
        """Begin a call; `replies` answers it, unless it has no number."""
        self.open.append((number, self._answer(call)))

    def forget(self, number: int) -> None:
        """Give up a call."""
        for one in [one for one in self.open if one[0] == number]:
            self.open.remove(one)
            one[1].close()

    def replies(self) -> list[Reply]:
        """Go on with all calls; the answers of those that are done."""
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
    """The answer of a call, or its failure; None: it takes more steps."""
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

"""Parts of the engine around the step: they hook into the lives of requests, and answer operators' calls."""

import logging
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any

from radix import Event
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
        active: whether the engine calls the part's hooks; call `EngineCore.refresh` after a change.
        idle_s: longest time between two calls of `settle`, in seconds; None: no limit.
    """

    active: bool = True
    idle_s: float | None = None

    @property
    def busy(self) -> bool:
        """Whether the part waits for results that its `poll` must collect."""
        return False

    def answers(self) -> Mapping[type[Call], Handler]:
        """Handlers of the calls that the part answers. If several parts answer a call, their answers are merged."""
        return {}

    def added(self, request: Request) -> None:
        """Take note of a new request. Raises RametError to refuse it."""

    def blocked_on(self, request: Request) -> Hashable | None:
        """The event that a new request must wait for, or None; the part passes the event to `Scheduler.wake` later."""

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        """Collect results that blocked requests or the part itself wait for; `step_s`: seconds of the last step.

        Returns:
            The terminal events of requests that fail.
        """
        return ()

    def scheduled(self, work: list[Work]) -> None:
        """Change the work of the next step."""

    def launching(self, batch: ForwardBatch) -> None:
        """Prepare the pages that a step will write."""

    def booked(self, work: Sequence[Work], num_rows: int, seconds: float) -> None:
        """Take note of a step whose results have been read; `seconds`: since its launch."""

    def prefilled(self, request: Request) -> None:
        """Take note of computed rows of a prompt, before their first token is booked."""

    def ended(self, request: Request, finish: Finish) -> None:
        """Take note of a request's end."""

    def flush(self) -> None:
        """Drop what depends on cached KV."""

    def settle(self) -> None:
        """Publish what a step or a message has changed."""

    def kv_events(self) -> Mapping[str, Sequence[Event]]:
        """Events of KV that the part keeps outside of the pool, since the last call, by tier."""
        return {}

    def mark(self, nodes: list[dict[str, Any]]) -> Iterator[None]:
        """Add to descriptions of the tree's nodes what the part knows of them, if need be over several steps."""
        return iter(())

    def resume(self) -> None:
        """Take up what the engine before this one left; all parts are installed."""

    def state(self) -> Mapping[str, Any]:
        """Counters and gauges for operators."""
        return {}

    def close(self) -> None:
        """Release threads, sockets and files."""


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

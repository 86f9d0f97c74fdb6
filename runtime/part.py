"""The base of an engine's parts: they hook into the lives of requests, and answer operators' calls."""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any

from runtime.batch import ForwardBatch
from runtime.calls import Call
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request, Work

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

    def state(self) -> Mapping[str, Any]:
        """Counters and gauges for operators."""
        return {}

    def close(self) -> None:
        """Release threads, sockets and files."""

"""Parts of the engine around the step: they hook into the lives of requests, and answer operators' calls."""

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence

from radix import Event
from runtime.batch import ForwardBatch
from runtime.calls import Answers, State
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request, Work


class Part:
    """A part of the engine. The engine calls only the hooks that a part defines.

    Attributes:
        idle_s: longest time between two calls of `settle`, in seconds; None: no limit.
    """

    idle_s: float | None = None

    @property
    def busy(self) -> bool:
        """Whether the part, of which `Parts.wait` was told, waits for results that its `poll` must collect."""
        return False

    def answers(self) -> Answers:
        """The calls that the part answers, each made by `EngineCall.by`."""
        return ()

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

    def erase(self, tenant: str) -> None:
        """Drop what the part keeps of a tenant in memory, besides what `flush` drops."""

    def erase_blocks(self, tenant: str | None) -> Generator[None, None, dict[str, int | None]]:
        """Erase a tenant's blocks in tiers, or all (None); their number by tier, None for a tier that failed."""
        yield from ()
        return {}

    def tiers_of(self, nodes: Sequence[int]) -> Generator[None, None, dict[int, list[str]] | None]:
        """The names of the tiers that hold a node's first page, by the node's id; None: the part has no tiers."""
        yield from ()
        return None

    def resume(self) -> None:
        """Take up what the engine before this one left; all parts are installed."""

    def report(self, state: State) -> None:
        """Add the part's counters, histograms and gauges."""

    def close(self) -> None:
        """Release threads, sockets and files."""


# Hooks that the engine calls while it serves requests.
_HOOKS = (
    "added", "blocked_on", "poll", "scheduled", "launching", "booked", "prefilled", "ended", "flush", "settle",
    "kv_events",
)  # fmt: skip


class Parts:
    """The parts of an engine. For each hook, it has the list of the methods of parts that define the hook.

    Most parts define few. To call all hooks of all parts would take an eighth more calls for a decoded token.

    Attributes:
        waiting: parts that are polled in every step.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self.added: list[Callable[[Request], None]] = []
        self.blocked_on: list[Callable[[Request], Hashable | None]] = []
        self.poll: list[Callable[[float], Sequence[TokenEvent]]] = []
        self.scheduled: list[Callable[[list[Work]], None]] = []
        self.launching: list[Callable[[ForwardBatch], None]] = []
        self.booked: list[Callable[[Sequence[Work], int, float], None]] = []
        self.prefilled: list[Callable[[Request], None]] = []
        self.ended: list[Callable[[Request, Finish], None]] = []
        self.flush: list[Callable[[], None]] = []
        self.settle: list[Callable[[], None]] = []
        self.kv_events: list[Callable[[], Mapping[str, Sequence[Event]]]] = []
        self.waiting: list[Part] = []

    def add(self, part: Part) -> None:
        """Add a part. Its hooks are called after those of earlier parts."""
        self._parts.append(part)
        for hook in _HOOKS:
            if getattr(type(part), hook) is not getattr(Part, hook):
                getattr(self, hook).append(getattr(part, hook))

    def wait(self, part: Part, waits: bool) -> None:
        """Poll a part in every step, or only while requests are blocked."""
        others = [one for one in self.waiting if one is not part]
        self.waiting = [*others, part] if waits else others

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    @property
    def busy(self) -> bool:
        return any(part.busy for part in self.waiting)

    @property
    def idle_s(self) -> float | None:
        """The shortest `Part.idle_s`."""
        return min((part.idle_s for part in self._parts if part.idle_s is not None), default=None)

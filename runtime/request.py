"""A request in the engine, its work in a step, and the interfaces of the objects that serve it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Generic, Never, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from radix import Match, Namespace
from radix.node import Meta
from runtime.asks import DecodingParams, ReuseReport
from runtime.batch import RowSet, StateRows
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment, Sequence
from runtime.protocol import AddRequest, Admission, Finish, TokenEvent
from runtime.sampler_state import SampledTokens, SamplerState, StepResult


class GivenRows(Protocol):
    """States with which rows of a request enter the first layer in place of embeddings, as those of images do.

    Some of these rows may see each other. Their KV is right only where one step has computed all of them.
    """

    def load(self, first: int, stop: int) -> abc.Sequence[tuple[np.ndarray, torch.Tensor]]:
        """`Stage.load` of the sequence's rows `first` to `stop` (exclusive), counted from `first`.

        The first replaces states; each other is added before the next layer. Empty: no row has such states.
        """

    def is_ready(self, first: int) -> bool:
        """Whether `load` has the states of all rows from `first` on. If not, a part blocks the request."""

    def cut(self, place: int) -> tuple[int, int]:
        """First row and end of the rows that see each other, and of which some are before `place` and some are not.

        If `place` cuts no such rows, it is both.
        """

    def axes(self, first: int, stop: int) -> np.ndarray | None:
        """`RowSet.axes` of the sequence's rows `first` to `stop` (exclusive)."""

    def seen(self, first: int, stop: int) -> np.ndarray | None:
        """The end of what each of the rows sees, int32 [stop - first]; None: its own row is the last that it sees."""


class Status(Enum):
    """The state of a request."""

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """A live request.

    Attributes:
        message: the message that opened the request.
        sampler: the sampler's state.
        sequence: the tokens that the request computes; the first `prompt_len` of them belong to the prompt.
        max_length: length of `sequence` at which the request ends.
        strategy: the way in which the request reuses KV.
        lease: what the strategy lets the request read and compute; set by `Strategy.open`.
        num_reads: how often `segments` has changed.
        decoding: chooses the request's tokens.
        decoding_state: what the decoding keeps of the request; only it knows the type.
        serial: order of arrival.
        namespace: namespace of the sequence; a strategy may change it according to what the request reads.
        segments: KV that the request reads; `read` changes it.
        given: states with which some rows enter the first layer; None: all rows enter it with embeddings of tokens.
        entry_tokens: int32, prompt tokens that are not in `sequence`, because their KV is read from entries.
        event: the next event; all parts of the engine write their reports into it.
        cached_tokens: prompt tokens found in the cache at the first admission; -1 before.
        row_layers: rows x layers computed so far.
        arrival_s, admitted_s: engine clock, seconds; 0: not yet.
    """

    message: AddRequest
    sampler: SamplerState
    sequence: Sequence
    prompt_len: int
    max_length: int
    strategy: AnyStrategy
    decoding: Decoding
    serial: int = 0
    namespace: Namespace = field(init=False)
    segments: tuple[Segment, ...] = ()
    num_reads: int = 0
    lease: Lease = field(init=False)
    decoding_state: object = None
    given: GivenRows | None = None
    entry_tokens: array[int] = field(default_factory=lambda: array("i"))
    event: TokenEvent = field(init=False)
    status: Status = Status.WAITING
    cached_tokens: int = -1
    row_layers: int = 0
    arrival_s: float = 0.0
    admitted_s: float = 0.0

    def __post_init__(self) -> None:
        self.namespace = self.message.namespace
        self.event = TokenEvent(self.message.rid, admission=Admission())

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def owner(self) -> Namespace:
        """The tenant whose quota the request's new pages count against, also in a namespace that tenants share."""
        return Namespace(self.message.account) if self.message.account else self.message.namespace.owner

    def read(self, segments: abc.Iterable[Segment]) -> None:
        """Change the KV that the request reads."""
        self.segments = tuple(segments)
        self.num_reads += 1

    @property
    def tokens(self) -> array[int]:
        """Tokens of prompt and output that the request computes itself."""
        return self.sequence.tokens

    @property
    def num_remaining(self) -> int:
        """Rows left to compute: 1 while decoding, more while a prompt (or a retracted sequence) is prefilled."""
        sequence = self.sequence
        return len(sequence.tokens) - sequence.num_computed + sequence.pending

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the prompt, including `entry_tokens`."""
        return self.prompt_len + len(self.entry_tokens)

    @property
    def num_present(self) -> int:
        """Tokens whose KV the request reads or has computed."""
        return sum(segment.length for segment in self.segments) + self.sequence.num_computed - self.sequence.start

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.sequence.tokens) - self.prompt_len

    def stops_at(self, token: int, num_output: int) -> bool:
        """Whether a token ends the request as the last of `num_output` generated ones."""
        return token in self.sampler.stop_ids and num_output >= self.sampler.params.min_new_tokens

    @property
    def wants_tokens(self) -> bool:
        """Whether the request generates tokens; if not, only its prompt is computed."""
        return self.max_length > self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be reported."""
        return self.sampler.prompt_logprobs_from is not None and not self.num_output

    def key(self, num_tokens: int) -> bytes:
        """The tree's key of the first `num_tokens` tokens."""
        return self.sequence.tokens[:num_tokens].tobytes()

    def note_admitted(self, now_s: float) -> None:
        """Report the first admission in the next event."""
        self.admitted_s = now_s
        admission = self.event.admission
        assert admission is not None
        admission.queue_s = now_s - self.arrival_s
        left = admission.cached_tokens = max(self.cached_tokens, 0)
        loaded, admission.loaded_tokens = admission.loaded_tokens, {}
        for tier, tokens in loaded.items():
            if (read := min(tokens, left)) > 0:
                admission.loaded_tokens[tier] = read
                left -= read

    def note_progress(self) -> bool:
        """Report the computed part of the prompt in the next event; False if the request does not want its progress."""
        wanted = self.message.progress and not self.num_output
        if wanted:
            self.event.computed = len(self.entry_tokens) + self.sequence.num_computed
        return wanted

    def take_event(self, tokens: list[int], finish: Finish | None = None) -> TokenEvent:
        """Take the next event, with new output tokens and the strategy's report."""
        event, self.event = self.event, TokenEvent(self.message.rid)
        event.tokens, event.finish = tokens, finish
        if tokens and len(tokens) == self.num_output:
            event.prefill_s = time.monotonic() - self.admitted_s
        event.reuse = self.lease.report()
        return event


@dataclass(slots=True, eq=False)
class Work:
    """A request's share of one step.

    Attributes:
        start, count: the range of the sequence that is computed.
        num_rows: number of rows in the step.
        ahead: 1 if the token to compute comes from a step that has not been read yet, else 0.
        draft: int32, guesses of the next tokens. Their rows follow the row of the last token, and are kept if the
            guesses are right.
        note: takes the divergence of the second row set from the first, in nats; None: it is not measured.
        prefills: whether the rows are part of a prompt, or of a retracted sequence, rather than of decoding.
    """

    request: Request
    start: int
    count: int
    num_rows: int
    ahead: int = 0
    draft: array[int] = field(default_factory=lambda: array("i"))
    note: abc.Callable[[float], None] | None = None
    prefills: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prefills = not self.ahead and (self.request.num_remaining > 1 or not self.request.num_output)

    @property
    def samples(self) -> bool:
        """Whether the last of these rows gives a new token."""
        return self.start + self.count == len(self.request.sequence.tokens) + self.ahead + len(self.draft)

    def add(self, draft: array[int]) -> None:
        """Add the rows that verify a draft."""
        self.draft = draft
        self.count += len(draft)
        self.num_rows += len(draft)

    def keep(self, num_tokens: int) -> None:
        """Keep the rows that gave the first `num_tokens` new tokens; drop the draft's other rows."""
        self.draft = self.draft[: num_tokens - 1]
        self.count = self.num_rows = num_tokens

    @property
    def is_live(self) -> bool:
        return self.request.status is not Status.ENDED


@dataclass(slots=True)
class Found:
    """KV that exists for a waiting request. `tokens` need not be computed; `match`: of the request's own tokens."""

    tokens: int
    match: Match


class Lease(ABC):
    """What one request reads and computes, as its strategy decides; it has the state of the request there.

    `runtime.reuse.prefix.PrefixLease` implements the rows of strategies that compute the sequence in order.

    A waiting request: `prepare`, `look`, perhaps `peer`, then `admit`. A running one, in each step: `grow`, `work`,
    `rows`, `book`. At its end, or when it gives way to others: `release`; then it may be admitted again.
    """

    def __init__(self, strategy: AnyStrategy, request: Request):
        self.strategy, self.request, self.cache = strategy, request, strategy.cache

    @property
    def steady(self) -> bool:
        """Whether each row from now on reads the same KV as the row before it, plus that row."""
        return self.strategy.steady

    # -- waiting ---------------------------------------------------------------------------------------------

    def reads(self) -> list[Run]:
        """The runs that the request would read if they existed. Tiers load what the tree lacks of them."""
        return []

    def prepare(self) -> None:  # noqa: B027 - most requests do not depend on others while they wait
        """Bring the request up to date with what others have done. `look` follows."""

    @abstractmethod
    def look(self) -> Found:
        """Look up the cached KV. Changes nothing."""

    def peer(self, found: Found, computing: abc.Sequence[Lease]) -> tuple[Request, int] | None:
        """A running request that is computing KV which this request would compute, too.

        `computing`: requests of the same strategy that prefill.

        Returns:
            One of `computing`, and how many of its tokens must be computed before this request waits again; None to
            admit this request now.
        """
        return None

    @abstractmethod
    def admit(self, found: Found, headroom: int) -> bool:
        """Lock the segments and allocate pages for the sequence.

        Args:
            found: the result of `look` in this moment.
            headroom: pages that must stay available for requests that decode.

        Returns:
            False, with nothing changed, if memory does not suffice.
        """

    # -- running ---------------------------------------------------------------------------------------------

    def expect(self, place: int) -> None:  # noqa: B027
        """Take note that others wait for the first `place` tokens, which `peer` of their leases returned."""

    @abstractmethod
    def grow(self, ahead: int = 0) -> bool:
        """Make room for the next token's KV, and for `ahead` more; False if memory does not suffice."""

    @abstractmethod
    def work(self, limit: int) -> Work:
        """The request's share of the next step; `limit`: most rows, which unchunkable requests may exceed."""

    @abstractmethod
    def shrink(self, work: Work) -> bool:
        """Leave half of the rows to later steps; False if the work cannot be divided."""

    @abstractmethod
    def rows(self, work: Work) -> list[RowSet]:
        """The row sets of a piece of work, whose pages are already allocated."""

    def take_slots(self, work: Work) -> StateRows | None:
        """Take slots for the states of a piece of work; returns the `state` of its only row set.

        `rows` does it, too. A step that repeats a plan calls this alone. If the work is run again, with fewer rows, its
        slots are taken anew. None: the model has no recurrent layers.
        """
        return None

    @abstractmethod
    def book(self, work: Work, saved: abc.Sequence[torch.Tensor | None], seconds: float) -> bool:
        """Take over computed rows.

        Args:
            work: the work that was computed.
            saved: hidden states that its row sets saved.
            seconds: time that the rows took.

        Returns:
            Whether `Decoding` gets the logits of the work.
        """

    @abstractmethod
    def release(self, keep: bool) -> None:
        """Give up all pages and segments; with `keep`, computed rows stay cached."""

    def distrust(self) -> None:  # noqa: B027
        """Drop from the cache what the request read or stored, since its logits are not finite. `release` follows."""

    # -- reports ---------------------------------------------------------------------------------------------

    def phase(self) -> str:
        """The phase of the running request, for operators."""
        return "decode" if self.request.num_output else "prefill"

    def report(self) -> ReuseReport | None:
        """The `reuse` field of the request's next event; None if there is nothing new."""
        return None


A = TypeVar("A", contravariant=True)


class Strategy(ABC, Generic[A]):
    """A way to reuse KV, for an `ask` of type `A`: opens the leases of its requests, and has what they share.

    Attributes:
        name: the tag of the asks that it serves.
        unchunkable: whether rows cannot be cut into chunks, because they see each other. Such requests take turns.
        steady: `Lease.steady` of its leases, if they do not differ.
        keeps_prompts: whether a computed prompt is in the tree under its own tokens.
        counted, counters: names and values of the counters that the strategy and its leases alone advance.
    """

    name: ClassVar[str]
    keeps_prompts: ClassVar[bool] = False
    unchunkable: ClassVar[bool] = False
    steady: ClassVar[bool] = False
    counted: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cache: PagedCache, num_layers: int):
        self.cache = cache
        self.num_layers = num_layers
        self.counters = dict.fromkeys(self.counted, 0)

    @abstractmethod
    def open(self, request: Request, ask: A) -> Lease:
        """The lease of a new request, whose sequence it lays out. Raises InvalidRequest if it cannot be served."""

    def runs(self, tokens: array[int], namespace: Namespace, ask: A | None = None) -> list[Run]:
        """The runs of the tree that hold the KV of a prompt, once it is computed. Raises InvalidRequest as `open`.

        Args:
            tokens: int32, the prompt's whole pages.
            namespace: namespace of the prompt's requests.
            ask: see `open`.
        """
        return [Run(tokens, namespace)]

    def slices(self, ask: A, most: int) -> abc.Sequence[A]:
        """The ask in pieces with at most `most` runs each, for calls that take many steps."""
        return [ask]

    def restored(self, tokens: array[int], namespace: Namespace) -> None:
        """Take note that a tier has loaded a run, or part of it, into the tree."""

    def meta_of(self, namespace: Namespace, described: abc.Mapping[str, object]) -> Meta | None:
        """The record of an entry, from its `Meta.describe()`; None if the entry is not of this strategy."""
        return None

    def flush(self) -> None:
        """Drop what the strategy keeps beside the tree, as the cache is flushed."""

    def figures(self) -> dict[str, float]:
        """Gauges of the strategy for operators, by name."""
        return {}


# A strategy of which nobody knows what it is asked: a `Strategy` of any type is one.
AnyStrategy: TypeAlias = Strategy[Never]


class Decoding(ABC):
    """Chooses tokens from logits, and makes events of them.

    Attributes:
        counted, counters: names and values of the counters that the decoding alone advances.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.counters = dict.fromkeys(self.counted, 0)

    def open(self, request: Request, params: DecodingParams | None) -> None:  # noqa: B027 - next tokens need no state
        """Prepare a new request. `params`: see `AddRequest.decoding`."""

    @abstractmethod
    def wanted(self, work: Work) -> np.ndarray:
        """Rows, int64 and ascending, whose logits are wanted; 0 is the first row of the work."""

    def choose(
        self,
        work: abc.Sequence[Work],
        logit_rows: abc.Sequence[abc.Sequence[slice]],
        logits: torch.Tensor,
        version: int = 0,
    ) -> SampledTokens | None:
        """Choose next tokens on the device of the logits, without waiting for them; None if no request gets a token.

        Args:
            work: the rows of each request.
            logit_rows: rows of the logits, by piece of work and row set.
            logits: float32 [S, vocab].
            version: equal for steps that have the same rows of the same requests; 0: unknown.
        """
        return None

    def cut(self, request: Request, tokens: list[int]) -> list[int]:
        """New tokens of a request up to the first one that ends it."""
        return tokens

    @abstractmethod
    def book(self, work: Work, result: StepResult) -> TokenEvent | None:
        """Apply the results of a piece of work, after the strategy has booked its rows.

        Returns:
            The event, if any; `finish` is set if the request ends.

        Raises:
            RametError: if no token can be chosen; the request ends with it.
        """

"""A request in the engine, its work in a step, and the interfaces of the objects that serve it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch

from radix import Namespace
from radix.node import Meta
from runtime.batch import RowSet
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment, Sequence
from runtime.protocol import AddRequest, Admission, Finish, TokenEvent
from runtime.sampler_state import SampledTokens, SamplerState, StepResult


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
        message: asked for it.
        sampler: the sampler's state.
        sequence: the tokens that it computes, of which the first `prompt_len` are the prompt's own.
        max_length: length of `sequence` at which the request ends.
        strategy: decides what the request reads and computes; `reuse` is the state that it keeps here.
        decoding: chooses the request's tokens; `canvas` is the state that it keeps here for a diffusion model.
        serial: order of arrival.
        namespace: of the sequence, which may depend on what the request reads.
        segments: KV that it reads.
        draft: the drafter's state.
        entry_tokens: int32, tokens of the prompt whose KV the request reads from entries, beside `sequence`.
        event: the next event, into which anyone may write what it should report.
        cached_tokens: prompt tokens found in the cache at the first admission; -1 before.
        row_layers: rows x layers computed so far.
        arrival_s, admitted_s: engine clock, seconds; 0: not yet.
    """

    message: AddRequest
    sampler: SamplerState
    sequence: Sequence
    prompt_len: int
    max_length: int
    strategy: Strategy
    decoding: Decoding
    serial: int = 0
    namespace: Namespace = field(init=False)
    segments: list[Segment] = field(default_factory=list)
    reuse: Any = None
    canvas: Any = None
    draft: Any = None
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
        """The tenant whose quota its pages in the tree count against. Of shared text, each tenant pays for its own."""
        return Namespace(self.message.account) if self.message.account else self.message.namespace.owner

    @property
    def tokens(self) -> array[int]:
        """Prompt and output, as far as the request computes them itself."""
        return self.sequence.tokens

    @property
    def num_remaining(self) -> int:
        """Rows to be computed: 1 while decoding, more while a prompt (or a retracted sequence) is prefilled."""
        sequence = self.sequence
        return len(sequence.tokens) - sequence.num_computed + sequence.pending

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, those of entries included."""
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
        """Whether tokens are to be generated; else the prompt is only computed."""
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

    def take_event(self, tokens: list[int], finish: Finish | None = None) -> TokenEvent:
        """The next event, with the last tokens of the output, and the strategy's report."""
        event, self.event = self.event, TokenEvent(self.message.rid)
        event.tokens, event.finish = tokens, finish
        if tokens and len(tokens) == self.num_output:
            event.prefill_s = time.monotonic() - self.admitted_s
        event.reuse = self.strategy.report(self)
        return event


@dataclass(slots=True, eq=False)
class Work:
    """A request's share of one step.

    Attributes:
        start, count: the range of the sequence that is computed.
        num_rows: rows of the step.
        ahead: 1 where the one token to be computed is chosen by a step that has not been read yet.
        draft: int32, tokens that may follow the last one; their rows are computed behind its own, and count if they
            turn out to be right.
        detail: the strategy's own, for planning and booking.
        prefills: whether these rows are part of a prompt, or of what was retracted, rather than of decoding.
    """

    request: Request
    start: int
    count: int
    num_rows: int
    ahead: int = 0
    draft: array[int] = field(default_factory=lambda: array("i"))
    detail: Any = None
    prefills: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prefills = not self.ahead and (self.request.num_remaining > 1 or not self.request.num_output)

    @property
    def samples(self) -> bool:
        """Whether the last of these rows gives a new token."""
        return self.start + self.count == len(self.request.sequence.tokens) + self.ahead + len(self.draft)

    def add(self, draft: array[int]) -> None:
        """Verify a draft as well."""
        self.draft = draft
        self.count += len(draft)
        self.num_rows += len(draft)

    def keep(self, num_tokens: int) -> None:
        """Leave out the rows of a draft behind those that gave the first `num_tokens` new tokens."""
        self.draft = self.draft[: num_tokens - 1]
        self.count = self.num_rows = num_tokens

    @property
    def is_live(self) -> bool:
        return self.request.status is not Status.ENDED


@dataclass(slots=True)
class Found:
    """KV that exists for a waiting request.

    Attributes:
        tokens: prompt tokens that need not be computed.
        detail: what the strategy wants to know at admission.
    """

    tokens: int = 0
    detail: Any = None


class Strategy(ABC):
    """Decides what requests read, what they compute, and what is kept of it.

    `runtime.reuse.prefix.PrefixStrategy` implements the rows of strategies that compute the sequence in order.

    Attributes:
        name: the `method` by which a request asks for it.
        unchunkable: whether a step cannot be cut into chunks, as its rows see each other. Such requests take turns.
        steady: whether what a row of a decoding request reads is what the row before it read, and that row.
        keeps_prompts: whether a computed prompt lies in the tree under its own tokens.
        counted, counters: names and values of the strategy's own counters.
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

    def open(self, request: Request, asked: dict[str, Any]) -> None:  # noqa: B027 - most strategies need no state
        """Take a new request: lay out its sequence, and refuse what cannot be served.

        Args:
            request: new; waits next.
            asked: the `reuse` fields of its message.

        Raises:
            InvalidRequest: for fields that do not fit.
        """

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        """The runs of the tree in which the KV of a prompt lies, once it is computed.

        Args:
            tokens: int32, the prompt's whole pages.
            namespace: of its requests.
            asked: as of `open`.

        Raises:
            InvalidRequest: for fields that do not fit.
        """
        return [Run(tokens, namespace)]

    def reads(self, request: Request) -> list[Run]:
        """The runs that a waiting request would read, where they exist. A tier may have what the tree lacks."""
        return []

    def restored(self, tokens: array[int], namespace: Namespace) -> None:  # noqa: B027
        """Take note of a run of which all or some has come into the tree from a tier."""

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> Meta | None:
        """The record of an entry of this strategy, from how it described itself; None if it is none."""
        return None

    @abstractmethod
    def find(self, request: Request) -> Found:
        """Look up what exists for a waiting request. Reads only."""

    def peer(self, request: Request, found: Found, computing: abc.Sequence[Request]) -> tuple[Request, int] | None:
        """The running request that computes now what this one would compute, too, and when it will be there.

        `computing` are requests of this strategy that prefill.

        Returns:
            One of `computing`, and the number of its tokens that must be computed before this request is looked up
            again; None to admit this request now.
        """
        return None

    @abstractmethod
    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        """Lock the segments of a waiting request and allocate pages for its sequence.

        Args:
            request: reads nothing yet.
            found: a fresh `find` of it.
            headroom: pages that must stay available for requests that decode.

        Returns:
            False, with nothing changed, if memory does not suffice.
        """

    @abstractmethod
    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Make room for the next token's KV, and for `ahead` more; False if memory does not suffice."""

    @abstractmethod
    def work(self, request: Request, limit: int) -> Work:
        """The request's share of the next step; `limit`: most rows, which unchunkable requests may exceed."""

    @abstractmethod
    def shrink(self, work: Work) -> bool:
        """Leave half of the rows to later steps; False if that cannot be."""

    @abstractmethod
    def rows(self, work: Work) -> list[RowSet]:
        """The rows of a piece of work; their pages are allocated."""

    @abstractmethod
    def book(self, work: Work, saved: abc.Sequence[torch.Tensor | None], seconds: float) -> bool:
        """Book rows that were computed.

        Args:
            work: what was computed.
            saved: states that its row sets saved.
            seconds: what the rows took.

        Returns:
            Whether the work's logits go to the decoding.
        """

    @abstractmethod
    def release(self, request: Request, keep: bool) -> None:
        """Take all pages and segments from a running request; with `keep`, computed rows stay cached."""

    def distrust(self, request: Request) -> None:  # noqa: B027
        """Drop from the cache what a request read or left there, before it is released: its logits were no numbers."""

    def flush(self) -> None:  # noqa: B027
        """Drop what the strategy keeps beside the tree, as the cache is flushed."""

    def figures(self) -> dict[str, float]:
        """Figures of its own besides counters, for operators."""
        return {}

    def phase(self, request: Request) -> str:
        """The phase of a running request, for people."""
        return "decode" if request.num_output else "prefill"

    def report(self, request: Request) -> dict[str, Any] | None:
        """The `reuse` field of the request's next event; None: it has nothing new to say."""
        return None


class Decoding(ABC):
    """The choice of tokens from logits, and their booking.

    Attributes:
        counted, counters: names and values of its own counters.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.counters = dict.fromkeys(self.counted, 0)

    def open(self, request: Request, asked: dict[str, Any]) -> None:  # noqa: B027 - next-token models need no state
        """Take a new request; `asked`: the `diffusion` fields of its message."""

    @abstractmethod
    def wanted(self, work: Work) -> np.ndarray:
        """Rows, int64 and ascending, whose logits are wanted; 0 is the first row of the work."""

    def choose(
        self, work: abc.Sequence[Work], places: abc.Sequence[abc.Sequence[slice]], logits: torch.Tensor
    ) -> SampledTokens | None:
        """Choose next tokens on the device of the logits, without a wait; None: no request gets one.

        Args:
            work: the rows of each request.
            places: rows of the logits, by piece of work and row set.
            logits: float32 [S, vocab].
        """
        return None

    def cut(self, request: Request, tokens: list[int]) -> list[int]:
        """New tokens of a request up to the first one that ends it."""
        return tokens

    @abstractmethod
    def book(self, work: Work, result: StepResult) -> TokenEvent | None:
        """Book a piece of computed work, of which the strategy has booked the rows.

        Returns:
            The event, if any; `finish` is set if the request ends.

        Raises:
            RametError: if no token can be chosen; the request ends with it.
        """

"""A request in the engine: the segments of KV that it reads, and the one sequence that it computes."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from radix import Namespace, Node
from runtime.params import SamplingParams
from runtime.protocol import CacheBooks, Lookup, Place

if TYPE_CHECKING:
    from runtime.reuse.strategy import Strategy
    from runtime.sampling.decoding import Decoding
    from runtime.sampling.grammar import Grammar


EVERYBODY = Namespace()


class Status(Enum):
    """The state of a live request."""

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"


@dataclass(slots=True)
class Segment:
    """KV that exists and that a request reads.

    Attributes:
        pages: int32 page ids, any subset of an entry's pages: attention does not depend on their order.
        length: rows; only the last page may be used in part.
        position: the position of the first row in this request.
        shift: how many positions further on the rows are read than they were computed for.
        layers: in which layers the rows are valid; None: in all.
        keep: bool [length], rows that count; None: all. Leaving out whole pages is cheaper.
        node: the locked tree node to which the pages belong; None: they still belong to this request alone.
        exact: whether reading them gives what computing them would.
    """

    pages: array[int]
    length: int
    position: int = 0
    shift: int = 0
    layers: range | None = None
    keep: torch.Tensor | None = None
    node: Node | None = None
    exact: bool = True


class Run(NamedTuple):
    """Tokens int32 under which KV lies in the tree, from the root of a namespace on.

    `meta`: of an entry; `whole`: whether a part of it is of no use.
    """

    tokens: array[int]
    namespace: Namespace
    name: str | None = None
    meta: Any = None
    whole: bool = False


@dataclass(slots=True)
class Sequence:
    """Tokens that a request computes itself. An index into them is not a position.

    Attributes:
        tokens: int32.
        start: leading tokens whose KV lies in the request's first segment; whole pages.
        num_computed: leading tokens that have KV, in that segment or in `pages`.
        seconds: what computing those took that are not in the tree.
        pages: int32 page ids, for the tokens from `start` on; they belong to this request alone.
        anchors: (index, position) pairs, ascending: from each index on, positions are consecutive.
    """

    tokens: array[int]
    start: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    pages: array[int] = field(default_factory=lambda: array("i"))
    anchors: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def position(self, index: int) -> int:
        """The position of one token, which need not exist yet."""
        nearest = 0 if len(self.anchors) == 1 else bisect_right(self.anchors, index, key=itemgetter(0)) - 1
        at, position = self.anchors[nearest]
        return position + index - at

    def positions(self, first: int, stop: int) -> np.ndarray:
        """The positions int64 [stop - first] of a range of indices."""
        if len(self.anchors) == 1 or stop - first == 1:
            position = self.position(first)
            return np.array((position,)) if stop - first == 1 else np.arange(position, position + stop - first)
        indices = np.arange(first, stop)
        starts, positions = np.array(self.anchors, dtype=np.int64).T
        nearest = np.searchsorted(starts, indices, side="right") - 1
        return positions[nearest] + indices - starts[nearest]

    def slots(self, first: int, stop: int, page_size: int) -> np.ndarray:
        """The pool slots int64 [stop - first] of a range of indices, none below `start`."""
        if stop - first == 1:
            page, row = divmod(first - self.start, page_size)
            return np.array((self.pages[page] * page_size + row,))
        return slots_of(self.pages, np.arange(first - self.start, stop - self.start), page_size)


def slots_of(pages: array[int], rows: np.ndarray, page_size: int) -> np.ndarray:
    """The pool slots int64 [n] of rows int64 [n] of some pages."""
    table = np.frombuffer(pages, dtype=np.int32)
    return table[rows // page_size].astype(np.int64) * page_size + rows % page_size


@dataclass(slots=True, eq=False)
class Request:
    """A live request.

    Attributes:
        strategy: decides what the request reads and computes; `reuse` is the state that it keeps here.
        decoding: chooses the request's tokens; `canvas` is the state that it keeps here for a diffusion model.
        owner: whose quota the pages count against that the request leaves in the tree.
        entry_tokens: int32, tokens of the prompt whose KV the request reads from entries, beside `tokens`.
        owed: rows of entries that it has yet to encode before its own.
        keep: places up to which its prompt is to be kept, and has not been yet.
        books: of its prompt, until an event tells them.
        max_tokens: length of prompt and output at which the request ends, without `entry_tokens`.
        prompt_logprobs_from: the first prompt index whose log-probability is still owed; None: none is.
        counts: int64 [vocab], how often each token was generated, and `prompt_ids`, those of the prompt; on the
            device of the logits, and only where a penalty needs them. None: to be made from `tokens`.
        grammar: the state of the grammar that the output follows; None: there is none.
        draft: the state that the drafter keeps here; `drafted` tokens were verified, of which `accepted` were right.
        serial: order of arrival.
        matched_tokens, rank: of a waiting request: cached tokens when it was last looked up, and its place.
        turn: serial of the last step in which this request took its turn, see `Strategy.takes_turns`.
        cached_tokens: prompt tokens found in the cache at the first admission; -1 before.
        explain, lookup: whether its look-up at the first admission is told, and that, until an event tells it.
        store: whether what it computes may outlive it.
        loaded: tokens that were loaded for it before it was admitted, by tier; num_loads: how often it waited for some.
        row_layers: rows x layers computed so far.
        arrival_s, admitted_s, first_token_s: engine clock, seconds.
    """

    rid: str
    sequence: Sequence
    prompt_len: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    strategy: Strategy
    decoding: Decoding
    namespace: Namespace = EVERYBODY
    owner: Namespace = EVERYBODY
    priority: int = 0
    serial: int = 0
    segments: list[Segment] = field(default_factory=list)
    reuse: Any = None
    entry_tokens: array[int] = field(default_factory=lambda: array("i"))
    owed: int = 0
    keep: list[Place] = field(default_factory=list)
    books: CacheBooks | None = None
    canvas: Any = None
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    counts: torch.Tensor | None = None
    prompt_ids: torch.Tensor | None = None
    grammar: Grammar | None = None
    draft: Any = None
    drafted: int = 0
    accepted: int = 0
    status: Status = Status.WAITING
    matched_tokens: int = 0
    rank: Any = None
    turn: int = 0
    cached_tokens: int = -1
    explain: bool = False
    lookup: Lookup | None = None
    store: bool = True
    loaded: dict[str, int] = field(default_factory=dict)
    num_loads: int = 0
    row_layers: int = 0
    arrival_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def tokens(self) -> array[int]:
        """Prompt and output, as far as the request computes them itself."""
        return self.sequence.tokens

    @property
    def num_remaining(self) -> int:
        """Rows to be computed: 1 while decoding, more while a prompt (or a retracted sequence) is prefilled."""
        return len(self.sequence.tokens) - self.sequence.num_computed + self.owed

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

    @property
    def loaded_tokens(self) -> dict[str, int]:
        """Those of `cached_tokens` that were loaded for this request, by tier."""
        left, found = max(self.cached_tokens, 0), {}
        for tier, tokens in self.loaded.items():
            found[tier] = min(tokens, left)
            left -= found[tier]
        return {tier: tokens for tier, tokens in found.items() if tokens}

    def stops_at(self, token: int, num_output: int) -> bool:
        """Whether a token ends the request as the last of `num_output` generated ones."""
        return token in self.stop_ids and num_output >= self.sampling.min_new_tokens

    @property
    def wants_tokens(self) -> bool:
        """Whether tokens are to be generated; else the prompt is only computed."""
        return self.max_tokens > self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens still owe log-probabilities."""
        return self.prompt_logprobs_from is not None and not self.num_output

    def key(self, num_tokens: int) -> bytes:
        """The tree's key of the first `num_tokens` tokens."""
        return self.sequence.tokens[:num_tokens].tobytes()


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
    """

    request: Request
    start: int
    count: int
    num_rows: int
    ahead: int = 0
    draft: array[int] = field(default_factory=lambda: array("i"))
    detail: Any = None

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
    def prefills(self) -> bool:
        """Whether these rows are part of a prompt, or of what was retracted, rather than of decoding."""
        return self.request.num_remaining > 1 or not self.request.num_output

"""The input of a front end, `Submission`, what it becomes, `Encoded`, and the result, `Output`."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from radix import Namespace
from radix.node import TOKEN_BYTES
from runtime.asks import AnyReuse, DecodingParams, PartsAsk, ReuseAsk, ReuseReport
from runtime.errors import RametError
from runtime.frontend.pictures import Pictures
from runtime.frontend.replay import EarlierAnswer
from runtime.params import SamplingParams
from runtime.protocol import CacheUsage, Finish, Lookup, TokenLogprob

# Most breakpoints of a prompt.
MAX_BREAKPOINTS = 4


class UnplacedPrompt(ABC):
    """A prompt of texts and other parts, of which a feature's `Preparer` makes tokens.

    Attributes:
        noun: what the parts are, for errors.
    """

    __slots__ = ()

    noun: ClassVar[str]

    @property
    @abstractmethod
    def num_characters(self) -> int: ...


class PartedPrompt(ABC):
    """A prompt with parts that a feature reuses by themselves.

    Attributes:
        noun: what the parts are, for errors.
        tokens: the prompt's own tokens; parts may have others.
        ask: see `AddRequest`; None: only an exact prefix is reused.
    """

    __slots__ = ()

    noun: ClassVar[str]
    tokens: list[int]
    ask: PartsAsk | None

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens, with those of the parts."""

    @property
    @abstractmethod
    def has_parts(self) -> bool: ...

    @property
    def positions(self) -> int:
        """Number of positions, which is the position of the first generated token."""
        return self.length

    @property
    def partial_pages(self) -> int:
        """Number of pages that parts may fill in part."""
        return 0

    @abstractmethod
    def report(self, engine: ReuseReport | None, cached_tokens: int) -> ReuseReport | None:
        """The answer's `reuse`, or None; `engine`: the engine's report, if there is one."""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text with breakpoints: pairs (characters, seconds), see `Submission.breakpoints`."""

    text: str
    breakpoints: list[tuple[int, float]]


Prompt = str | MarkedText | list[int] | UnplacedPrompt | PartedPrompt
Logprobs = list[TokenLogprob] | None


def expected_tokens(characters: int) -> int:
    """Estimated number of tokens of a text."""
    return characters // 4


def new_rid() -> str:
    return uuid.uuid4().hex


def prompts_of(given: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a list was given. A list of integers is one prompt, of token ids."""
    if isinstance(given, str | MarkedText | UnplacedPrompt | PartedPrompt) or (given and isinstance(given[0], int)):
        return [given], False  # type: ignore[list-item]
    return list(given), True  # type: ignore[arg-type]


class Submission(msgspec.Struct, frozen=True):
    """One prompt and its parameters; it has `sampling.n` completions.

    Attributes:
        prompt: text, token ids, or a prompt with parts; or a function that returns one of these, which is called in a
            thread.
        sampling: sampling parameters; `max_new_tokens` may be None, for as many as fit in the context.
        otherwise: replaces `sampling` if the grammar cannot be followed; None: the submission is refused then.
        rid: request id; unique among an account's live requests.
        account: the tenant, for the limits on open requests.
        namespace: requests of different namespaces never share cached pages.
        logprobs: alternatives to report for each output token; None: no log-probabilities.
        prompt_logprobs_from: first prompt position with log-probabilities; None: none.
        priority: larger goes first among waiting requests.
        add_special_tokens: whether to add the model's BOS to a text prompt (a chat template has it already).
        decoding: what is asked of a decoding that does not choose next tokens; None: the model's defaults.
        shared_text: returns the beginning of the prompt that other requests share, or None. It is for decodings whose
            reuse depends on where a prefix ends.
        num_characters: approximate length of a prompt that is rendered later.
        explain: whether Outputs contain the prompt's look-up in the cache.
        reuse: how to reuse KV beyond exact prefixes; None: the server's default.
        store: whether the KV that the submission computes may stay cached after its end.
        hold_s: seconds for which the prefixes that it used are held afterwards; None: the configured time.
        breakpoints: pairs (tokens, seconds), at most MAX_BREAKPOINTS: the prompt's first tokens are kept until they
            have been unused for that time. A `MarkedText` has its own.
        last_tokens: number of tokens to keep from the end of the prompt; -1: as many as fit; None: all.
        show_tokens: whether the stream of Outputs holds the prompt's tokens.
        progress: whether there is an Output for each step that computes a part of the prompt.
        replay: whether earlier answers in a text keep the tokens that were sampled, and this answer may be replayed.
        images: the images whose marks the prompt's text has; None or empty: it has none.
    """

    prompt: Prompt | Callable[[], Prompt]
    sampling: SamplingParams = msgspec.field(default_factory=lambda: SamplingParams())
    otherwise: SamplingParams | None = None
    rid: str = msgspec.field(default_factory=new_rid)
    account: str = ""
    namespace: Namespace = Namespace()
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    add_special_tokens: bool = True
    decoding: DecodingParams | None = None
    shared_text: Callable[[], str | None] | None = None
    num_characters: int = 0
    explain: bool = False
    reuse: AnyReuse | None = None
    store: bool = True
    hold_s: float | None = None
    breakpoints: list[tuple[int, float]] = []
    last_tokens: int | None = None
    show_tokens: bool = False
    progress: bool = False
    replay: bool = True
    images: Pictures | None = None

    @property
    def expected_tokens(self) -> int:
        """Estimated number of tokens of the prompt, before it is tokenized."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        return expected_tokens(len(self.prompt) if isinstance(self.prompt, str) else self.num_characters)

    @property
    def key(self) -> tuple[str, str]:
        """Identifies a live submission. It includes the account, so that no tenant learns about ids of others."""
        return self.account, self.rid


class Encoded(Submission, frozen=True, kw_only=True):
    """A submission as `InputProcessor.encode` has checked and tokenized it.

    Its `prompt` is called and has its parts in place, `sampling` is clipped to the tokens that the prompt leaves,
    `decoding` has no defaults left, and `breakpoints` has those of a `MarkedText`.

    Attributes:
        tokens: int32 tokens that the prompt itself computes, as one bytes object.
        common: `sampling` as the caller made it, which all prompts of a body share.
        bad_words: tokens of `sampling.bad_words`.
        ask: what is asked of a reuse strategy.
        said: the tokenized text, for the replay of its answer.
    """

    tokens: bytes = b""
    common: SamplingParams = msgspec.field(default_factory=lambda: SamplingParams())
    bad_words: list[list[int]] = []
    ask: ReuseAsk | None = None
    said: EarlierAnswer | None = None

    @staticmethod
    def of(submission: Submission, prompt: Prompt) -> "Encoded":
        """A submission with its prompt and `common`; the other attributes have their defaults."""
        given = (getattr(submission, name) for name in Submission.__struct_fields__[1:])
        return Encoded(prompt, *given, common=submission.sampling)

    @property
    def parted(self) -> PartedPrompt | None:
        """The prompt, if it may have parts that are reused by themselves."""
        return self.prompt if isinstance(self.prompt, PartedPrompt) else None

    @property
    def length(self) -> int:
        """Number of the prompt's tokens, with those of its parts."""
        return len(self.tokens) // TOKEN_BYTES if self.parted is None else self.parted.length


class OutputListener(Protocol):
    """Gets the Outputs of submissions."""

    def add(self, submission: Encoded) -> int:
        """Take note of an accepted submission; returns the `index` of its Outputs."""

    def put(self, item: "Output | RametError") -> None:
        """Take an Output; the last one of a completion has `finish`, or is an error."""


class Output(msgspec.Struct):
    """The state of one completion after one or more steps.

    Attributes:
        index: position of the submission in the call.
        choice: index among the submission's `n` completions.
        rid: the submission's request id.
        text: the whole text so far; `delta`: the text since the last Output of this completion.
            Never ends within a UTF-8 character or a possible stop string.
        token_ids: all output tokens. All Outputs of a completion share this growing list; this Output has its first
            `completion_tokens` elements. `new_token_ids`: the tokens since the last Output.
        logprobs: for `new_token_ids`, if requested; `prompt_logprobs`: on the first Output, if requested.
        prompt_tokens, cached_tokens, completion_tokens: counts; cached tokens are prompt tokens read from the cache.
        loaded_tokens: of the cached tokens, those that tiers loaded for this request, by tier.
        finish: set on the last Output of a completion only.
        queue_s, prefill_s, e2e_s: seconds waiting, from admission to the first token, and since submission.
        reuse: report of reuse beyond exact prefixes.
        shown: all output positions, decided or not, if requested of a decoding that fills them in any order.
        lookup: the prompt's look-up in the cache, if requested, and if its KV is reused by prefix.
        usage: how the prompt used the cache, if it has breakpoints.
        drafted, accepted: number of draft tokens that were verified, and number of these that were right.
        computed: number of leading prompt tokens whose KV is there, while a prompt with `progress` is computed.
        replayed: number of prompt tokens that are the sampled tokens of earlier answers.
    """

    index: int
    choice: int
    rid: str
    text: str = ""
    delta: str = ""
    token_ids: list[int] = []
    new_token_ids: list[int] = []
    logprobs: Logprobs = None
    prompt_logprobs: Logprobs = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: Finish | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    e2e_s: float = 0.0
    reuse: ReuseReport | None = None
    shown: list[int] | None = None
    lookup: Lookup | None = None
    loaded_tokens: dict[str, int] = {}
    usage: CacheUsage | None = None
    drafted: int = 0
    accepted: int = 0
    computed: int = 0
    replayed: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens has ended the text."""
        return self.finish is not None and self.finish.type == "length"


def join_logprobs(first: Logprobs, later: Logprobs) -> Logprobs:
    """The log-probabilities of two successive Outputs."""
    return later if first is None else first if later is None else [*first, *later]


def merge_outputs(first: Output, later: Output) -> Output:
    """Merge two successive Outputs of one completion into one."""
    return msgspec.structs.replace(
        later,
        delta=first.delta + later.delta,
        new_token_ids=first.new_token_ids + later.new_token_ids,
        logprobs=join_logprobs(first.logprobs, later.logprobs),
        prompt_logprobs=join_logprobs(first.prompt_logprobs, later.prompt_logprobs),
    )

"""The input of a front end, `Submission`, and its result, `Output`."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radix import Namespace
from runtime.denoising import DenoisingParams
from runtime.frontend.documents.plan import DocumentPrompt
from runtime.frontend.documents.prompt import Segments
from runtime.frontend.schemas.compile import ModulePrompt
from runtime.params import AnyReuse, SamplingParams
from runtime.protocol import CacheUsage, Finish, Lookup, TokenLogprob

# Most places of a prompt up to which it is kept.
MAX_BREAKPOINTS = 4

PlacedPrompt = ModulePrompt | DocumentPrompt


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text whose beginnings are kept: (characters, seconds), see `Submission.breakpoints`."""

    text: str
    breakpoints: list[tuple[int, float]]


Prompt = str | MarkedText | list[int] | Segments | PlacedPrompt
Logprobs = list[TokenLogprob] | None


def expected_tokens(characters: int) -> int:
    """Tokens to expect of a text."""
    return characters // 4


def new_rid() -> str:
    return uuid.uuid4().hex


def prompts_of(given: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a list was given. A list of integers is one prompt, of token ids."""
    if isinstance(given, str | MarkedText | Segments | PlacedPrompt) or (given and isinstance(given[0], int)):
        return [given], False  # type: ignore[list-item]
    return list(given), True  # type: ignore[arg-type]


@dataclass(slots=True)
class Submission:
    """One prompt and its parameters; it has `sampling.n` completions.

    Attributes:
        prompt: text, token ids, or one that imports modules or holds documents; or a function that makes one of these,
            called in a thread.
        sampling: its `max_new_tokens` may be None, for as many as fit in the context.
        otherwise: parameters in its place where its grammar cannot be followed; None: the submission is refused.
        rid: request id; unique among an account's live requests.
        account: the tenant; open requests are counted by it.
        namespace: requests of different namespaces never share cached pages.
        logprobs: alternatives to report for each output token; None: no log-probabilities.
        prompt_logprobs_from: first prompt position with log-probabilities; None: none.
        priority: larger goes first among waiting requests.
        add_special_tokens: whether to add the model's BOS to a text prompt (a chat template has it already).
        diffusion: denoising parameters; None: the model's defaults, and for causal models.
        shared_text: renders the prompt's beginning that other requests share, if it has one, for `diffusion` without
            `prefix_tokens`.
        num_characters: of a prompt that is still to be rendered, about.
        explain: whether Outputs tell the prompt's look-up in the cache.
        tokens: int32, the prompt's own, once it is submitted.
        reuse: of a prompt's documents, or of reasoning steps; None: the server's default.
        store: whether the KV that it computes may outlive it.
        breakpoints: (tokens, seconds), at most MAX_BREAKPOINTS: the prompt's first tokens are kept for that time from
            their last use on. Those of a `MarkedText` are known once it is tokenized.
        last_tokens: only so many last tokens of a text or of ids are the prompt; -1: as many as fit; None: all.
        show_tokens: whether the stream of Outputs holds the prompt's tokens.
    """

    prompt: Prompt | Callable[[], Prompt]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams())
    otherwise: SamplingParams | None = None
    rid: str = field(default_factory=new_rid)
    account: str = ""
    namespace: Namespace = Namespace()
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    add_special_tokens: bool = True
    diffusion: DenoisingParams | None = None
    shared_text: Callable[[], str | None] | None = None
    num_characters: int = 0
    explain: bool = False
    tokens: bytes = b""
    reuse: AnyReuse | None = None
    store: bool = True
    breakpoints: list[tuple[int, float]] = field(default_factory=list)
    last_tokens: int | None = None
    show_tokens: bool = False

    @property
    def expected_tokens(self) -> int:
        """Tokens to expect of the prompt, before it is tokenized."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        return expected_tokens(len(self.prompt) if isinstance(self.prompt, str) else self.num_characters)

    @property
    def key(self) -> tuple[str, str]:
        """Identifies a live submission. Ids are separate by account, so that none learns of another's."""
        return self.account, self.rid


class Output(msgspec.Struct):
    """The state of one completion after one or more steps.

    Attributes:
        index: position of the submission in the call.
        choice: which of its `n` completions.
        rid: the submission's request id.
        text: the whole text so far; `delta`: the text since the last Output of this completion.
            Never ends within a UTF-8 character or a possible stop string.
        token_ids: all output tokens; the list is shared by a completion's Outputs and grows, the first
            `completion_tokens` are this one's. `new_token_ids`: the new ones.
        logprobs: for `new_token_ids`, if requested; `prompt_logprobs`: on the first Output, if requested.
        prompt_tokens, cached_tokens, completion_tokens: counts; cached tokens are prompt tokens read from the cache.
        loaded_tokens: those of the cached ones that had to be loaded first, by tier.
        finish: set on the last Output of a completion only.
        queue_s, prefill_s, e2e_s: seconds waiting, from admission to the first token, and since submission.
        reuse: on the shared prefix of a diffusion model, on modules, documents or reasoning steps: what was reused.
        canvas: all output positions of a diffusion model, decided or masked, if requested.
        lookup: of the prompt in the cache, if requested, and if its KV is reused by prefix.
        usage: of the cache by the prompt, if it has breakpoints.
        drafted, accepted: tokens of drafts that were verified, and how many of them were right.
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
    reuse: dict[str, Any] | None = None
    canvas: list[int] | None = None
    lookup: Lookup | None = None
    loaded_tokens: dict[str, int] = {}
    usage: CacheUsage | None = None
    drafted: int = 0
    accepted: int = 0


def join_logprobs(first: Logprobs, later: Logprobs) -> Logprobs:
    """The log-probabilities of two successive Outputs."""
    return later if first is None else first if later is None else [*first, *later]


def merge_outputs(first: Output, later: Output) -> Output:
    """Two successive Outputs of one completion as one."""
    return msgspec.structs.replace(
        later,
        delta=first.delta + later.delta,
        new_token_ids=first.new_token_ids + later.new_token_ids,
        logprobs=join_logprobs(first.logprobs, later.logprobs),
        prompt_logprobs=join_logprobs(first.prompt_logprobs, later.prompt_logprobs),
    )

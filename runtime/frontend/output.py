"""What goes into a front end (`Submission`) and what comes out of it (`Output`)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from radix import Namespace
from runtime.params import DiffusionParams, SamplingParams
from runtime.protocol import Finish, TokenLogprob

Prompt = str | list[int]
Logprobs = list[TokenLogprob] | None


def new_rid() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


def prompts_of(given: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """One or several prompts as a list, and whether several were given: a list of integers is one, of token ids."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given], False  # type: ignore[list-item]
    return list(given), True  # type: ignore[arg-type]


@dataclass(slots=True)
class Submission:
    """One prompt and how it should be continued; `sampling.n` completions come of it.

    Attributes:
        prompt: text, or token ids.
        sampling: its `max_new_tokens` may be None for as many as the context holds.
        rid: request id; unique among an account's live requests.
        account: whose it is; open requests are counted by it.
        namespace: requests of different namespaces never share cached pages.
        logprobs: number of alternatives to report per output token; None: no log-probabilities.
        prompt_logprobs_from: position from which prompt tokens get log-probabilities; None: none.
        priority: larger goes first among waiting requests.
        add_special_tokens: whether tokenizing a text prompt adds the model's BOS (a chat template has it already).
        diffusion: how a diffusion model denoises; None: its defaults, and for causal models.
        shared_text: text that the prompt begins with and others do, too, where `diffusion` says nothing of it.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams())
    rid: str = field(default_factory=new_rid)
    account: str = ""
    namespace: Namespace = Namespace()
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    add_special_tokens: bool = True
    diffusion: DiffusionParams | None = None
    shared_text: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Tells it from all other live ones; nobody learns from it which ids others use."""
        return self.account, self.rid


@dataclass(slots=True)
class Output:
    """The state of one completion after one or more steps.

    Attributes:
        index: position of the submission in the call.
        choice: which of its `n` completions.
        rid: the submission's request id.
        text: the whole text so far; `delta`: the part that is new since the last Output of this completion.
            Never ends within a UTF-8 character or within what may become a stop string.
        token_ids: all output tokens; the list is shared by a completion's Outputs and grows, the first
            `completion_tokens` are this one's. `new_token_ids`: the new ones.
        logprobs: for `new_token_ids`, where asked for; `prompt_logprobs`: on the first Output, where asked for.
        prompt_tokens, cached_tokens, completion_tokens: counts; cached ones are prompt tokens read from the cache.
        finish: set on the last Output of a completion, and on no other.
        queue_s, prefill_s, e2e_s: seconds waiting, from admission to the first token, and since submission.
        reuse: of a diffusion model: what was reused of the shared prefix.
        canvas: of a diffusion model, where it was asked for: all output positions, decided or masked.
    """

    index: int
    choice: int
    rid: str
    text: str
    delta: str
    token_ids: list[int]
    new_token_ids: list[int]
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: Finish | None
    queue_s: float
    prefill_s: float
    e2e_s: float
    reuse: dict[str, Any] | None = None
    canvas: list[int] | None = None


def join_logprobs(first: Logprobs, later: Logprobs) -> Logprobs:
    """Those of two Outputs that follow each other; an Output without new tokens has none."""
    return later if first is None else first if later is None else [*first, *later]


def merge_outputs(first: Output, later: Output) -> Output:
    """Two Outputs of one completion as one: for a reader that was slower than the engine."""
    return replace(
        later,
        delta=first.delta + later.delta,
        new_token_ids=first.new_token_ids + later.new_token_ids,
        logprobs=join_logprobs(first.logprobs, later.logprobs),
        prompt_logprobs=join_logprobs(first.prompt_logprobs, later.prompt_logprobs),
    )

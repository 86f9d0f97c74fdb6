"""What goes into a front end (`Submission`) and what comes out of it (`Output`)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from runtime.protocol import Finish, TokenLogprob
from runtime.sampling_params import SamplingParams


def new_rid() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class Submission:
    """One prompt and how it should be continued; `sampling.n` completions come of it.

    Attributes:
        prompt: text, or token ids.
        sampling: its `max_new_tokens` may be None for as many as the context holds.
        rid: request id; unique among live requests.
        namespace: requests of different namespaces never share cached pages.
        logprobs: number of alternatives to report per output token; None: no log-probabilities.
        prompt_logprobs_from: position from which prompt tokens get log-probabilities; None: none.
        priority: larger goes first among waiting requests.
        add_special_tokens: whether tokenizing a text prompt adds the model's BOS (a chat template has it already).
    """

    prompt: str | list[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams())
    rid: str = field(default_factory=new_rid)
    namespace: str = ""
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    add_special_tokens: bool = True


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
    """

    index: int
    choice: int
    rid: str
    text: str
    delta: str
    token_ids: list[int]
    new_token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: Finish | None
    queue_s: float
    prefill_s: float
    e2e_s: float

"""One sequence in the engine, from arrival to its one terminal event."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import torch

from radix import Namespace, Node
from runtime.params import SamplingParams
from runtime.sampling.grammar import Grammar


@dataclass(slots=True, eq=False)
class Request:
    """A sequence that waits or runs.

    Attributes:
        tokens: prompt and output, int32.
        num_computed: leading tokens whose KV is in the pool. Waiting requests have 0.
        pages: the page table; the first `num_tree_pages` belong to the tree, the rest to this request alone.
        node: the locked tree node at which the tree's part of the page table ends.
        prompt_logprobs_from: the first prompt position whose log-probability is still owed; None: none are wanted.
        counts: int64 [vocab], how often each token was generated, and `prompt_ids`, those of the prompt; where the
            logits are, and only where a penalty needs them. None: to be made from `tokens`.
        grammar: what the output must follow, and where it is in that; None: nothing.
        matched_tokens, rank: of a waiting request: what the tree had of it when last looked up, and its place.
        cached_tokens: prompt tokens found in the cache when first admitted; -1 before.
        arrival_s, admitted_s, first_token_s: engine clock, seconds.
    """

    rid: str
    tokens: array[int]
    prompt_len: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    namespace: Namespace = Namespace()
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    sequence: int = 0
    num_computed: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_tree_pages: int = 0
    node: Node | None = None
    counts: torch.Tensor | None = None
    prompt_ids: torch.Tensor | None = None
    grammar: Grammar | None = None
    matched_tokens: int = 0
    rank: Any = None
    cached_tokens: int = -1
    arrival_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def num_remaining(self) -> int:
        """Tokens without KV yet: 1 while decoding, more while a prompt (or a retracted sequence) is prefilled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_tokens(self) -> bool:
        """Whether anything is to be generated at all; else the prompt is only read."""
        return self.max_tokens > self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still owe log-probabilities."""
        return self.prompt_logprobs_from is not None and not self.num_output

    @property
    def phase(self) -> str:
        """What it is at, for people."""
        if self.node is None and not self.pages:
            return "waiting"
        return "decode" if self.num_output else "prefill"

    def key(self, num_tokens: int) -> bytes:
        """The tree's key of the first `num_tokens` tokens."""
        return self.tokens[:num_tokens].tobytes()

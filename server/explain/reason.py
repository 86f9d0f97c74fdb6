"""The explanation of a cache miss, in Ramet's, OpenAI's and Anthropic's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from server.explain.compare import Parting

Reason = Literal[
    "hit", "new_text", "never_here", "tools_differ", "system_differs", "messages_differ", "prompt_differs", "evicted",
    "expired", "flushed", "other_salt", "too_short", "not_stored", "not_read", "comparison_not_found",
    "entries_missing", "unavailable", "no_point",
]  # fmt: skip
DIFFER: dict[str, Reason] = {
    "tools": "tools_differ",
    "system": "system_differs",
    "message": "messages_differ",
    "prompt": "prompt_differs",
}
# Reason and message by cause of eviction.
LEFT: dict[str, tuple[Reason, str]] = {
    "room": ("evicted", "was evicted {} s ago: room was needed"),
    "quota": ("evicted", "was evicted {} s ago: the tenant was over its quota"),
    "flush": ("flushed", "was flushed {} s ago"),
    "expired": ("expired", "was evicted {} s ago: the time of its pin or hold was over"),
}
_HITS = ("hit", "new_text")
_OPENAI = {"tools_differ": "tools_changed"} | dict.fromkeys(
    ("system_differs", "messages_differ", "prompt_differs"), "input_changed"
)
_ANTHROPIC = {"tools_differ": "tools_changed", "system_differs": "system_changed"} | dict.fromkeys(
    ("messages_differ", "prompt_differs"), "messages_changed"
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why only the first `cached` tokens of a prompt were read from the cache.

    Attributes:
        reason: `hit` if no further tokens could have been read.
        message: the reason in words.
        prompt, cached: numbers of tokens.
        compared_with: an earlier answer's id, or `nearest`; None: no prompts were compared.
        parting: where the compared prompts begin to differ; None if they do not.
        replayed: number of prompt tokens that are the sampled tokens of earlier answers.
    """

    reason: Reason
    message: str
    prompt: int
    cached: int
    compared_with: str | None = None
    parting: Parting | None = None
    replayed: int = 0

    def describe(self) -> dict[str, object]:
        """The field `explain` of an answer."""
        return {
            "reason": self.reason,
            "message": self.message,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "missed_tokens": self.prompt - self.cached,
            "replayed_tokens": self.replayed,
            "compared_with": self.compared_with,
            "parting": None if self.parting is None else self.parting.describe(),
        }

    def openai(self) -> dict[str, object]:
        """OpenAI's `prompt_cache_diagnostics`, which knows no reason for evicted KV."""
        if self.reason in _HITS:
            return {"type": "cache_hit"}
        if self.reason == "comparison_not_found":
            return {"type": "comparison_response_not_found"}
        if self.reason not in _OPENAI:
            return {"type": "unavailable"}
        miss = {"type": "cache_miss", "reason": _OPENAI[self.reason], "cache_missed_tokens": self.prompt - self.cached}
        return miss | ({} if self.parting is None else {"comparison_reusable_tokens": self.parting.token})

    def anthropic(self) -> dict[str, object] | None:
        """Anthropic's `diagnostics`; None for a hit."""
        if self.reason in _HITS:
            return None
        if self.reason == "comparison_not_found":
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        if self.reason not in _ANTHROPIC:
            return {"cache_miss_reason": {"type": "unavailable"}}
        missed = {"cache_missed_input_tokens": self.prompt - self.cached}
        return {"cache_miss_reason": {"type": _ANTHROPIC[self.reason], **missed}}

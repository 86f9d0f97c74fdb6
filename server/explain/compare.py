"""The place at which two rendered prompts part, and the text on both sides."""

from dataclasses import dataclass
from typing import Any

from radix.node import TOKEN_BYTES, common_tokens
from runtime.models.tokenizer import Tokenizer
from server.explain.parts import Conversation, Part, common_characters, part_at

# Tokens shown before the place, and on each side after it.
_BEFORE, _BEHIND = 16, 24


@dataclass(frozen=True, slots=True)
class Parting:
    """The place at which a prompt parts from another one.

    Attributes:
        token: shared leading tokens.
        part: contains the first different character.
        offset: characters of the part before it.
        before: shared text; here: this prompt's continuation; there: the other's, None if it must not be shown.
    """

    token: int
    part: Part
    offset: int
    before: str
    here: str
    there: str | None

    def describe(self) -> dict[str, Any]:
        part = {"part": self.part.kind} | ({} if self.part.index is None else {"index": self.part.index})
        text = {"before": self.before, "here": self.here, "there": self.there}
        return {"token": self.token, **part, "offset": self.offset, **text}


def find_parting(
    tokenizer: Tokenizer, tokens: bytes, token: int, other: bytes | None, conversation: Conversation | None
) -> Parting:
    """The parting of a prompt from another one after `token` shared tokens.

    Args:
        tokens: the prompt, int32.
        other: int32, the other prompt's continuation; None: it must not be shown.
        conversation: rendered by the prompt; None: it is plain text.
    """

    def text(run: bytes, start: int, stop: int) -> str:
        ids = memoryview(run[start * TOKEN_BYTES : stop * TOKEN_BYTES]).cast("i").tolist()
        return tokenizer.decode(ids, skip_special_tokens=False)

    here, there = text(tokens, token, token + _BEHIND), None if other is None else text(other, 0, _BEHIND)
    shared = 0 if there is None else common_characters(here, there)
    before = text(tokens, 0, token) + here[:shared]
    part = Part("prompt")
    if conversation is not None:
        whole = text(tokens, 0, len(tokens) // TOKEN_BYTES)
        part = part_at(conversation.parts(whole), len(before))
        if part.kind in ("system", "message") and there is not None and conversation.describes_tools(there[shared:]):
            part = Part("tools", len(before))
    shown = text(tokens, max(token - _BEFORE, 0), token) + here[:shared]
    other_side = None if there is None else there[shared:]
    return Parting(token, part, len(before) - part.start, shown, here[shared:], other_side)


def compare(tokenizer: Tokenizer, tokens: bytes, other: bytes, conversation: Conversation | None) -> Parting:
    """The parting of two prompts, int32 each; at the end of the shorter one if it begins the longer one."""
    token = common_tokens(tokens, 0, other)
    return find_parting(tokenizer, tokens, token, other[token * TOKEN_BYTES :], conversation)

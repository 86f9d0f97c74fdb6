"""Finds where two rendered prompts begin to differ, and the text on both sides."""

from dataclasses import dataclass

from radix.node import TOKEN_BYTES, common_tokens
from runtime.models.tokenizer import Tokenizer
from server.explain.conversation import Conversation, PromptSection, common_characters, section_at

# Tokens shown before the difference, and of each prompt after it.
_BEFORE, _BEHIND = 16, 24


@dataclass(frozen=True, slots=True)
class Parting:
    """The place where a prompt begins to differ from another prompt.

    Attributes:
        token: number of shared leading tokens.
        part: the section of this prompt with the first different character.
        offset: number of characters of that section before the first different one.
        before: the last shared text; here, there: how this prompt and the other go on; there is None if it is secret.
    """

    token: int
    part: PromptSection
    offset: int
    before: str
    here: str
    there: str | None

    def describe(self) -> dict[str, object]:
        part = {"part": self.part.kind} | ({} if self.part.index is None else {"index": self.part.index})
        text = {"before": self.before, "here": self.here, "there": self.there}
        return {"token": self.token, **part, "offset": self.offset, **text}


def find_parting(
    tokenizer: Tokenizer, tokens: bytes, token: int, other: bytes | None, conversation: Conversation | None
) -> Parting:
    """The `Parting` of two prompts that share their first `token` tokens.

    Args:
        tokens: the first prompt, int32.
        other: the other prompt behind the shared tokens, int32; None: its text must not be shown.
        conversation: the one that the first prompt renders; None: it is plain text.
    """

    def text(run: bytes, start: int, stop: int) -> str:
        ids = memoryview(run[start * TOKEN_BYTES : stop * TOKEN_BYTES]).cast("i").tolist()
        return tokenizer.decode([token for token in ids if token >= 0], skip_special_tokens=False)  # without images

    here, there = text(tokens, token, token + _BEHIND), None if other is None else text(other, 0, _BEHIND)
    shared = 0 if there is None else common_characters(here, there)
    before = text(tokens, 0, token) + here[:shared]
    part = PromptSection("prompt")
    if conversation is not None:
        whole = text(tokens, 0, len(tokens) // TOKEN_BYTES)
        part = section_at(conversation.sections(whole), len(before))
        if part.kind in ("system", "message") and there is not None and conversation.describes_tools(there[shared:]):
            part = PromptSection("tools", len(before))
    shown = text(tokens, max(token - _BEFORE, 0), token) + here[:shared]
    other_side = None if there is None else there[shared:]
    return Parting(token, part, len(before) - part.start, shown, here[shared:], other_side)


def compare(tokenizer: Tokenizer, tokens: bytes, other: bytes, conversation: Conversation | None) -> Parting:
    """The `Parting` of two int32 prompts. If one is a prefix of the other, they part at its end."""
    token = common_tokens(tokens, 0, other)
    return find_parting(tokenizer, tokens, token, other[token * TOKEN_BYTES :], conversation)

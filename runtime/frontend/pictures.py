"""Images in the texts of prompts: a mark stands for each, which names its content. A feature knows what models see."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from runtime.asks import ImagesAsk

# Marks are of private use, so that no other text has them by chance. They name a content, so that a text with one has
# the same images as an equal text: `Replay` compares texts.
MARK = re.compile("\ue0f0[0-9a-f]{64}\ue0f1")
_BESIDE = re.compile(f"\n?({MARK.pattern})\n?")
# Most images of a prompt.
MOST_IMAGES = 64


class Pictures(Protocol):
    """The images of one prompt; true if there are any. They encode the prompt's text in place of the tokenizer.

    Attributes:
        asked: what the engine needs of them, set by `place`; None: the prompt has none.
        param: see `Sight.pictures`.
    """

    asked: ImagesAsk | None
    param: str

    def __bool__(self) -> bool: ...

    def add(self, data: bytes, media_type: str = "") -> str:
        """Add the bytes of an image; returns the mark that stands for it in a text. Raises InvalidRequest."""

    def add_url(self, url: str) -> str:
        """Add the image of a data URL; returns the mark that stands for it in a text.

        Raises InvalidRequest for other URLs, as nothing is fetched here, and for an image that is too large.
        """

    def add_base64(self, text: str, media_type: str = "") -> str:
        """As `add_url`, of an image in base64. Raises InvalidRequest, also if the image is of another type."""

    def at_tokens(self, text: str, given: Sequence[str | bytes]) -> str:
        """Add data URLs, base64 or bytes; returns a text with their marks in place of the image's token.

        Raises InvalidRequest if the text does not have it once for each image.
        """

    def write(self, template: Callable[[list[dict[str, Any]]], str], turns: list[dict[str, Any]]) -> str:
        """The text of a chat with the marks where the template writes images.

        Args:
            template: applies the chat template to turns.
            turns: with marks in their contents, which are texts.
        """

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. Raises InvalidRequest for an image that cannot be decoded."""

    def encode_with_ends(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """See `Tokenizer.encode_with_ends`. The tokens of an image's rows are negative, and end with its mark.

        Raises InvalidRequest for an image that cannot be decoded.
        """

    def read(self, text: str) -> None:
        """Decode the images of a text whose tokens are known. Raises InvalidRequest."""

    def named(self, text: str) -> str:
        """A text with the token that chat templates write for an image in place of marks."""

    def place(self, tokens: list[int]) -> None:
        """Set `asked` for the tokens of a prompt. Raises RametError."""

    def shown(self, tokens: list[int]) -> list[int]:
        """The tokens of a prompt for clients: each row of an image has the token of that name."""


class Sight(Protocol):
    """How the model sees. Thread-safe."""

    def pictures(self, account: str, param: str, salt: str | None = None) -> Pictures:
        """No images yet of a prompt of an account and a salt. `param`: the request's field with them, for errors."""

    def erase(self, account: str) -> None:
        """Forget what is known of an account's images."""


def joined(texts: list[str]) -> str:
    """The parts of a message as one text, with line breaks between them, but for those beside the mark of an image."""
    return _BESIDE.sub(r"\1", "\n".join(texts))

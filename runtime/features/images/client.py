"""Images in prompts, in the server's process: a text has a mark for each image, whose tokens come from its pixels."""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec
from cachetools import LRUCache

from runtime.errors import InvalidRequest, RametError
from runtime.fair_threads import give_up_if_unwanted
from runtime.features.images.ask import ImagesAsk, TileRun
from runtime.features.images.decoding import PROCESSES, DecodeOrder
from runtime.features.images.rules import ImageLayout, Rules, tokens_of
from runtime.frontend.pictures import MARK, MOST_IMAGES
from runtime.models.marks import new_place
from runtime.models.templates import TemplateRefused
from runtime.models.tokenizer import Tokenizer

# Most bytes of an image.
MOST_BYTES = 20 << 20
# Number of images whose layouts are remembered.
_KNOWN = 4096
# The first bytes of the formats that are served, by group.
_BEGINS = re.compile(rb"(?P<PNG>\x89PNG)|(?P<JPEG>\xff\xd8\xff)|(?P<GIF>GIF8)|(?P<WEBP>RIFF....WEBP)", re.DOTALL)
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_DATA_URL = re.compile(r"data:([\w.+-]*/?[\w.+-]*)((?:;[\w.+-]+=[\w.+-]*)*);base64,", re.ASCII | re.IGNORECASE)


class ModelSight:
    """How the model sees: its rules, and the layouts of images that were decoded lately. Thread-safe.

    Attributes:
        rules: the model's.
        tokenizer: the model's.
    """

    def __init__(self, rules: Rules, tokenizer: Tokenizer):
        self.rules, self.tokenizer = rules, tokenizer
        self._layouts: LRUCache[tuple[str, str, str], ImageLayout] = LRUCache(_KNOWN)
        self._lock = threading.Lock()
        token = tokenizer.token_to_id(rules.image)
        if token is None:
            raise RametError(f"the tokenizer has no token {rules.image}")
        self.token = token

    def layout(self, account: str, salt: str, mark: str, data: bytes) -> ImageLayout:
        """How a prompt has an image. Raises InvalidRequest if it cannot be decoded."""
        with self._lock:
            known = self._layouts.get((account, salt, mark))
        if known is not None:
            return known
        found = PROCESSES.decode(DecodeOrder(self.rules, data))
        of_tiles = zip(found.digests, found.sizes, strict=True)
        tiles = [tokens_of(digest, self.rules.rows(*size)) for digest, size in of_tiles]
        widths = [width // self.rules.row for width, *_ in found.sizes]
        layout = ImageLayout(self.rules.text(found.width, found.height), tiles, widths)
        with self._lock:
            self._layouts[account, salt, mark] = layout
        return layout

    def pictures(self, account: str, param: str, salt: str | None = None) -> Images:
        return Images(self, account, param, salt or "")

    def erase(self, account: str) -> None:
        with self._lock:
            for key in [key for key in self._layouts if key[0] == account]:
                del self._layouts[key]
        PROCESSES.forget()


class Images:
    """The images of one prompt, see `Pictures`."""

    def __init__(self, sight: ModelSight, account: str, param: str, salt: str = ""):
        """See `Sight.pictures`."""
        self._sight, self._account, self._salt, self.param = sight, account, salt, param
        self._files: dict[str, bytes] = {}
        self._layouts: dict[str, ImageLayout] = {}
        self._count = 0
        self.asked: ImagesAsk | None = None

    def __bool__(self) -> bool:
        return bool(self._files)

    def add(self, data: bytes, media_type: str = "") -> str:
        """Add an image; returns the mark that stands for it in a text. Raises InvalidRequest if it is too much."""
        self._count += 1
        if self._count > MOST_IMAGES:
            raise self._too_many()
        if len(data) > MOST_BYTES:
            raise self._refused(f"an image has {len(data)} bytes; the limit is {MOST_BYTES}")
        named = media_type.rpartition("/")[2].upper().replace("JPG", "JPEG")
        begin = _BEGINS.match(data)
        if named and begin and named != (kind := begin.lastgroup):
            raise self._refused(f"the image is called {media_type}, but it is of the format {kind}")
        mark = f"\ue0f0{hashlib.sha256(data).hexdigest()}\ue0f1"
        self._files[mark] = data
        return mark

    def add_url(self, url: str) -> str:
        head = _DATA_URL.match(url[:256])
        if head is None:
            what = url[:64].partition(",")[0]
            raise self._refused(f"an image must be a data URL with base64, as nothing is fetched; this one is {what!r}")
        return self.add_base64(url[head.end() :], head[1])

    def add_base64(self, text: str, media_type: str = "") -> str:
        """Add an image in base64. Raises InvalidRequest."""
        try:
            data = msgspec.convert(text, bytes)  # no less strict than `base64`, which takes three times as long
        except (msgspec.ValidationError, UnicodeEncodeError):
            raise self._refused("an image is no base64 with padding and without line breaks") from None
        return self.add(data, media_type)

    def at_tokens(self, text: str, given: Sequence[str | bytes]) -> str:
        token = self._sight.rules.written
        pieces = text.split(token)
        if len(pieces) != len(given) + 1:
            raise self._refused(f"the text has {token} {len(pieces) - 1} times for {len(given)} images")
        return _interleaved(pieces, [self._add_any(one) for one in given])

    def _add_any(self, one: str | bytes) -> str:
        if isinstance(one, bytes):
            return self.add(one)
        return self.add_url(one) if _SCHEME.match(one) else self.add_base64(one)

    def parts(self, text: str) -> list[str]:
        """The text cut before and behind each mark of these images: text, mark, text and so on."""
        found, start = [], 0
        for match in MARK.finditer(text):
            if match[0] in self._files:
                found += [text[start : match.start()], match[0]]
                start = match.end()
        return [*found, text[start:]]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_with_ends(text, add_special_tokens)[0]

    def encode_with_ends(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        parts = self.parts(text)
        if len(parts) // 2 > MOST_IMAGES:  # a text may name an image of its request again and again
            raise self._too_many()
        layouts = [None if i % 2 == 0 else self._layout(part) for i, part in enumerate(parts)]
        pieces = [part if one is None else one.text for part, one in zip(parts, layouts, strict=True)]
        tokens, ends = self._sight.tokenizer.encode_with_ends("".join(pieces), add_special_tokens)
        at, shown, start = 0, 0, 0  # place of a piece in the tokens, in their text, and in the given text
        for part, piece, layout in zip(parts, pieces, layouts, strict=True):
            shown += len(piece)
            stop = bisect_right(ends, shown, at)
            if layout is not None:
                self._place(tokens, range(at, stop), layout)
                ends[at:stop] = [start + len(part)] * (stop - at)
            elif shown != start + len(part):
                ends[at:stop] = [end + start + len(part) - shown for end in ends[at:stop]]
            at, start = stop, start + len(part)
        return tokens, ends

    def place(self, tokens: list[int]) -> None:
        tiles: dict[int, list[tuple[int, int, array[int]]]] = defaultdict(list)
        layouts = [*self._layouts.values()]
        for i, layout in enumerate(layouts):
            for j, tile in enumerate(layout.tiles):
                if tile:  # none of its lines may show more than padding
                    tiles[tile[0]].append((i, j, tile))
        runs, at = list[TileRun](), 0
        places = [i for i, token in enumerate(tokens) if token < 0]
        rows = array("i", [tokens[i] for i in places])
        while at < len(rows):
            fits = ((i, j, len(tile)) for i, j, tile in tiles[rows[at]] if rows[at : at + len(tile)] == tile)
            if (found := next(fits, None)) is None:
                raise RametError("a tile of an image is not whole")
            file, number, count = found
            width = layouts[file].widths[number]
            runs.append(TileRun(places[at], places[at + count - 1] + 1, file, number, width))
            at += count
        self.asked = ImagesAsk([self._files[mark] for mark in self._layouts], runs) if runs else None

    def write(self, template: Callable[[list[dict[str, Any]]], str], turns: list[dict[str, Any]]) -> str:
        """If the template does not write all images as parts, as some do not for some roles, it gets marks in texts."""
        token, place = self._sight.rules.written, new_place()
        marks = [mark for turn in turns for mark in self.parts(turn["content"])[1::2]]
        if not marks:
            return template(turns)
        # A text may have the image's token, too, which is no image there.
        listed = _replaced([{**turn, "content": self._listed(turn["content"])} for turn in turns], token, place)
        with suppress(TemplateRefused):
            pieces = template(listed).split(token)
            if len(pieces) == len(marks) + 1:
                return _interleaved(pieces, marks).replace(place, token)
        return template(turns)

    def _listed(self, content: str) -> list[dict[str, str]]:
        parts = self.parts(content)
        listed = [{"type": "image"} if i % 2 else {"type": "text", "text": part} for i, part in enumerate(parts)]
        return [one for one in listed if one.get("text") != ""] or listed

    def named(self, text: str) -> str:
        token = self._sight.rules.written
        return "".join(token if i % 2 else part for i, part in enumerate(self.parts(text)))

    def read(self, text: str) -> None:
        for mark in self.parts(text)[1::2]:
            self._layout(mark)

    def shown(self, tokens: list[int]) -> list[int]:
        return [self._sight.token if token < 0 else token for token in tokens]

    def _layout(self, mark: str) -> ImageLayout:
        if mark not in self._layouts:
            give_up_if_unwanted()
            try:
                self._layouts[mark] = self._sight.layout(self._account, self._salt, mark, self._files[mark])
            except InvalidRequest as error:
                raise self._refused(error.message) from None
        return self._layouts[mark]

    def _place(self, tokens: list[int], places: range, layout: ImageLayout) -> None:
        """Put the tokens of an image's tiles into a prompt."""
        rows = [i for i in places if tokens[i] == self._sight.token]
        every = [token for tile in layout.tiles for token in tile]
        if len(rows) != len(every):
            raise RametError("the tokenizer does not write a token for each row of an image")
        for i, token in zip(rows, every, strict=True):
            tokens[i] = token

    def _too_many(self) -> InvalidRequest:
        return self._refused(f"there are more than {MOST_IMAGES} images")

    def _refused(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, param=self.param, code="invalid_image")


def _interleaved(pieces: Sequence[str], marks: Sequence[str]) -> str:
    return "".join(chain(*zip(pieces, [*marks, ""], strict=True)))


def _replaced(value: Any, old: str, new: str) -> Any:
    """A JSON value with a text replaced in all of its strings."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_replaced(one, old, new) for one in value]
    return {name: _replaced(one, old, new) for name, one in value.items()} if isinstance(value, dict) else value

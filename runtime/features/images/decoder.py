"""Decodes and cuts images: the program of the processes of `decoding.py`, whose memory and time are limited."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import signal
import sys
import warnings
from contextlib import suppress
from typing import Any

import msgspec
from PIL import Image, ImageOps, UnidentifiedImageError

from runtime.errors import InvalidRequest
from runtime.features.images.rules import Rules, as_rules
from runtime.models.template_program import read_frame, write_frame

# CPU seconds of one image, and bytes of memory of a process.
DECODE_S = 10
_MEMORY = 2 << 30
# By how much this process is nicer than the server: others' requests go first.
_YIELD = 5
# Most pixels of an image, and how many times longer than wide it may be.
MOST_PIXELS, MOST_RATIO = 1 << 25, 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class DecodeOrder(msgspec.Struct):
    """An image to decode; `pixels`: whether the answer has them, and no digests."""

    rules: Any  # `Rules`; `as_rules` makes them again of what msgspec reads
    data: bytes
    pixels: bool = False


class Decoded(msgspec.Struct):
    """A decoded image.

    Attributes:
        width, height: in pixels, upright.
        sizes: width, height and so on of each tile, see `Rules.tiles`.
        digests: of the size and the pixels of each tile; empty, if the pixels are wanted.
        tiles: uint8 [height, width, 3], each as bytes; empty, if they are not wanted.
        error: why it cannot be decoded; None: it has been.
    """

    width: int = 0
    height: int = 0
    sizes: list[tuple[int, ...]] = []
    digests: list[bytes] = []
    tiles: list[bytes] = []
    error: str | None = None


def decode(order: DecodeOrder) -> Decoded:
    """Decode an image and cut it into tiles. Raises InvalidRequest."""
    image = _open(order.data)
    rules = order.rules if isinstance(order.rules, Rules) else as_rules(order.rules)
    cut = rules.tiles(image)
    sizes, tiles = [size for _, size in cut], [tile.tobytes() for tile, _ in cut]
    if order.pixels:
        return Decoded(*image.size, sizes, tiles=tiles)
    digests = [
        hashlib.blake2b(pixels, digest_size=32, salt="x".join(map(str, (width, *more))).encode()).digest()
        for (width, _, *more), pixels in zip(sizes, tiles, strict=True)
    ]
    return Decoded(*image.size, sizes, digests)


def _open(data: bytes) -> Image.Image:
    """The first frame of an image, upright and in RGB. Raises InvalidRequest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise InvalidRequest(f"the image has too many pixels; at most {MOST_PIXELS} are served") from None
    except UnidentifiedImageError:
        raise InvalidRequest(f"the image is none of the served formats, {', '.join(FORMATS)}") from None
    except Exception as error:
        raise _undecodable(error) from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise InvalidRequest(f"the image has {width} x {height} pixels; at most {MOST_PIXELS} are served")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise InvalidRequest(f"the image has {width} x {height} pixels; its edges may differ {MOST_RATIO}-fold")
    try:
        image.load()
        return _in_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise InvalidRequest("decoding the image takes more memory than is available") from None
    except Exception as error:
        raise _undecodable(error) from None


def _undecodable(error: Exception) -> InvalidRequest:  # decoders raise whatever their input makes them
    return InvalidRequest(f"the image cannot be decoded: {str(error)[:200] or type(error).__name__}")


def _in_rgb(image: Image.Image) -> Image.Image:
    """As transformers: what is behind transparent pixels is white."""
    if image.mode.startswith("I;16"):
        image = image.point(lambda grey: grey / 256)  # Pillow would make white of all above 255
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _answer(order: bytes) -> Decoded:
    try:
        return decode(msgspec.msgpack.decode(order, type=DecodeOrder))
    except InvalidRequest as error:
        return Decoded(error=error.message)


def ignore_signals() -> None:
    """Ignore signals to the process group: this process ends with its standard input."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Answer the orders on standard input, until it ends. An order that lasts too long ends the process."""
    ignore_signals()
    os.nice(_YIELD)
    with suppress(OSError, ValueError):  # macOS has no such limit; the number of pixels bounds most
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    write_frame(sys.stdout.buffer, b"r")
    while order := read_frame(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, DECODE_S)
        signal.alarm(6 * DECODE_S)  # who asked may be gone
        answer = _answer(order)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()

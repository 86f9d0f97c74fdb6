"""Has images decoded in processes that can be killed."""

from __future__ import annotations

import atexit

import msgspec

from runtime.errors import InvalidRequest
from runtime.features.images import decoder
from runtime.features.images.decoder import DECODE_S, Decoded, DecodeOrder
from runtime.models.process_pool import ProcessPool
from runtime.models.template_program import read_frame, write_frame


class DecodingProcesses(ProcessPool):
    """A pool of processes, each of which decodes one image at a time."""

    def __init__(self) -> None:
        super().__init__("decode the image", ["-m", decoder.__name__], read_frame)

    def decode(self, order: DecodeOrder) -> Decoded:
        """Decode an image; blocks. Raises InvalidRequest if it cannot be decoded, Overloaded as `ask`."""
        data = msgspec.msgpack.encode(order)
        wait_s = 3 * DECODE_S  # on busy cores, CPU seconds take longer
        answer = self.ask(lambda orders: write_frame(orders, data), wait_s)
        if not answer:
            raise InvalidRequest(f"decoding the image takes longer than {DECODE_S} s, or more memory than is available")
        found = msgspec.msgpack.decode(answer, type=Decoded)
        if found.error is not None:
            raise InvalidRequest(found.error)
        return found


# Shared by all engines of this process.
PROCESSES = DecodingProcesses()
atexit.register(PROCESSES.close)

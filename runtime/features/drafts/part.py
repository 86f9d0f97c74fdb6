"""Drafts in the engine's step."""

from collections.abc import Sequence

from runtime.engine.part import Part
from runtime.features.drafts.drafter import Drafter
from runtime.protocol import Finish
from runtime.request import Request, Work


class Drafts(Part):
    """Adds drafts to the work of decoding requests, which verify them."""

    def __init__(self, drafter: Drafter, step_tokens: int):
        self.drafter = drafter
        self._step_tokens = step_tokens

    def scheduled(self, work: list[Work]) -> None:
        self.drafter.extend(work, self._step_tokens)

    def booked(self, work: Sequence[Work], num_rows: int, seconds: float) -> None:
        self.drafter.note_step(work, seconds)

    def ended(self, request: Request, finish: Finish) -> None:
        if finish.type != "error" and request.message.store:
            self.drafter.ended(request)

    def flush(self) -> None:
        self.drafter.clear()

"""What is written down about a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Record:
    """One request. All times are seconds since the run began, by one monotonic clock.

    Attributes:
        scheduled_s: when it should have been sent; latencies count from here.
        sent_s: when it was sent; later than scheduled if the client was held up or its load bound was reached.
        first_s: when the first text came, None if none did.
        end_s: when the answer was complete, or failed.
        arrivals_s: when each piece of the answer came; the first is `first_s`.
        output_tokens: by the server's count, else by a tokenizer that the user gave, else one a piece; `counted_by`
            says which.
        queue_s, prefill_s: as told by the server, or None.
        error: kind of failure, None for a complete answer.
    """

    number: int
    session: int = 0
    turn: int = 0
    group: str = ""
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    prompt_chars: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    wanted_tokens: int | None = None
    counted_by: str = "pieces"
    queue_s: float | None = None
    prefill_s: float | None = None
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    message: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the scheduled instant to the first text."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Seconds from the scheduled instant to the end."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, None if there is none."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.first_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between the pieces of the answer."""
        return [b - a for a, b in pairwise(self.arrivals_s)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in whole microseconds."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [round(item, 6) for item in value] if isinstance(value, list) else value

"""The record of a request."""

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

# Kind of error of a request that was still running when the run ended; it is no failure.
UNFINISHED = "unfinished"


@dataclass
class Record:
    """One request. All times are seconds since the start of the run, by one monotonic clock.

    Attributes:
        scheduled_s: its due time; latencies count from here.
        sent_s: time of sending; later than scheduled if the client was late or too many requests were running.
        first_s: arrival of the first text; None if no text arrived.
        end_s: end or failure of the answer.
        arrivals_s: arrival of each piece of the answer; the first is `first_s`.
        output_tokens: the server's count, else that of the user's tokenizer, else one a piece; see `counted_by`.
        queue_s, prefill_s: as reported by the server, or None.
        error: kind of failure; None for a complete answer.
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
        """Seconds from the scheduled time to the first text."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Seconds from the scheduled time to the end."""
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

"""Service levels, and which requests kept them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.http.record import Record

LATENCIES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Slo:
    """Upper bounds in seconds by latency; written `ttft:500 tpot:50`, in milliseconds."""

    bounds_s: dict[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Slo:
        """Read it from a command line. Raises ValueError."""
        bounds = {}
        for text in texts:
            name, colon, value = text.partition(":")
            try:
                bound = float(value)
            except ValueError:
                bound = -1.0
            if name not in LATENCIES or not colon or not bound > 0:
                raise ValueError(f"{text!r} is not LATENCY:MILLISECONDS with one of {', '.join(LATENCIES)}")
            bounds[name] = bound / 1000
        return cls(bounds)

    def kept_by(self, record: Record) -> bool:
        """Whether a request was answered within all bounds; its ITL counts by its longest gap."""
        if not record.ok:
            return False
        measured = {
            "ttft": record.ttft_s,
            "tpot": record.tpot_s,
            "itl": max(record.itl_s, default=None),
            "e2e": record.e2e_s,
        }
        # An answer of one token has no time between tokens, and so keeps every bound on it.
        return all((value := measured[name]) is None or value <= bound for name, bound in self.bounds_s.items())

    def __str__(self) -> str:
        return " ".join(f"{name}:{1000 * bound:g}" for name, bound in self.bounds_s.items())

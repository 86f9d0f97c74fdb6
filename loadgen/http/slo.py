"""Service level objectives."""

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
        """Bounds from the notation of the command line. Raises ValueError."""
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
        """Whether a request was answered within all bounds; its longest gap is its ITL."""
        if not record.ok:
            return False
        measured = {
            "ttft": record.ttft_s,
            "tpot": record.tpot_s,
            "itl": max(record.itl_s, default=None),
            "e2e": record.e2e_s,
        }
        # An answer of one token has no TPOT and no ITL, and keeps every bound on them.
        return all((value := measured[name]) is None or value <= bound for name, bound in self.bounds_s.items())

    def __str__(self) -> str:
        return " ".join(f"{name}:{1000 * bound:g}" for name, bound in self.bounds_s.items())

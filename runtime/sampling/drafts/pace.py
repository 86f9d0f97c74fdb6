"""Costs of longer steps and the success of drafts, as measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Share of a step's time that a further row is taken to cost before that is measured.
_UNKNOWN = 0.03
_RECENT = 0.2


class Pace:
    """Seconds of a decode step by its requests and its drafted rows; the latest steps count most."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}

    def note(self, requests: int, drafted: int, seconds: float) -> None:
        steps = self._seconds.setdefault(_bucket(requests), {})
        drafted = _bucket(drafted)
        before = steps.get(drafted)
        steps[drafted] = seconds if before is None else before + _RECENT * (seconds - before)

    def seconds(self, requests: int, most: int) -> np.ndarray | None:
        """Of steps with 0 to `most` drafted rows, float64 [most + 1]; None: one without drafts was never measured."""
        steps = self._seconds.get(_bucket(requests))
        if steps is None or 0 not in steps:
            return None
        rows = np.array(sorted(steps))
        known = np.maximum.accumulate([steps[n] for n in rows.tolist()])
        slope = _UNKNOWN * known[0]
        if len(rows) > 1:
            slope = max(slope, (known[-1] - known[-2]) / (rows[-1] - rows[-2]))
        wanted = np.arange(most + 1)
        return np.interp(wanted, rows, known) + np.maximum(wanted - rows[-1], 0) * slope


def _bucket(drafted: int) -> int:
    """Up to 4 rows each count apart, above that two buckets an octave, each under its upper end."""
    if drafted <= 4:
        return drafted
    half = 1 << (drafted - 1).bit_length() - 2
    return -(-drafted // half) * half


class Acceptance:
    """The rate at which the next token of a draft is right, given that all before it are."""

    def __init__(self, prior: Acceptance | None = None, memory: int = 256):
        """`prior`: what is believed before anything was tried here; `memory`: trials after which all weigh half."""
        self._prior, self._memory = prior, memory
        self._right, self._tried = (2.0, 4.0) if prior is None else (0.0, 0.0)

    @property
    def rate(self) -> float:
        if self._prior is None:
            return self._right / self._tried
        return (self._right + 4 * self._prior.rate) / (self._tried + 4)

    def note(self, right: int, drafted: int) -> None:
        """`right` tokens of a draft of `drafted` were right; those behind the first wrong one say nothing."""
        self._right += right
        self._tried += right + (right < drafted)
        if self._tried > self._memory:
            self._right, self._tried = self._right / 2, self._tried / 2
        if self._prior is not None:
            self._prior.note(right, drafted)


def share_out(chances: Sequence[np.ndarray], requests: int, seconds: np.ndarray) -> list[int]:
    """Rows for each draft, so that a step gives the most tokens a second.

    Args:
        chances: for each draft, how likely each of its tokens is accepted: descending.
        requests: of the step, each of which gets a token at least.
        seconds: of a step with 0, 1, ... drafted rows.
    """
    every = np.concatenate(chances)
    order = np.argsort(-every, kind="stable")[: len(seconds) - 1]
    gained = np.concatenate(([0.0], np.cumsum(every[order])))
    most = int(np.argmax((requests + gained) / seconds[: len(gained)]))
    owner = np.repeat(np.arange(len(chances)), [len(chance) for chance in chances])
    return np.bincount(owner[order[:most]], minlength=len(chances)).tolist()

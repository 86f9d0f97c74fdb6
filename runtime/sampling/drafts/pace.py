"""Costs of longer steps and the success of drafts, as measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Share of a step's time that a further row is taken to cost before that is measured.
_UNKNOWN = 0.03
_RECENT = 0.2


class Pace:
    """Seconds of a step by its requests that decode and its drafted rows; the latest steps count most."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._row_s: float | None = None  # of a row beside those of prompts

    def note(self, requests: int, drafted: int, seconds: float, beside: int = 0) -> None:
        """`beside`: rows of prompts in the step."""
        if beside:
            self._row_s = _follow(self._row_s, seconds / (requests + drafted + beside))
        else:
            steps, drafted = self._seconds.setdefault(_bucket(requests), {}), _bucket(drafted)
            steps[drafted] = _follow(steps.get(drafted), seconds)

    def seconds(self, requests: int, most: int, beside: int = 0) -> np.ndarray | None:
        """Of steps with 0 to `most` drafted rows, float64 [most + 1]; None: one without drafts was never measured.

        Beside rows of prompts, those of a step in which all decode, had it rows at the price of theirs: only tokens
        that come cheaper than in later steps may let prompts wait.
        """
        steps = self._seconds.get(_bucket(requests))
        if steps is None or 0 not in steps:
            return None
        wanted = np.arange(most + 1)
        if beside:
            return None if self._row_s is None else steps[0] + self._row_s * wanted
        rows = np.array(sorted(steps))
        known = np.maximum.accumulate([steps[n] for n in rows.tolist()])
        slope = _UNKNOWN * known[0]
        if len(rows) > 1:
            slope = max(slope, (known[-1] - known[-2]) / (rows[-1] - rows[-2]))
        return np.interp(wanted, rows, known) + np.maximum(wanted - rows[-1], 0) * slope


def _follow(before: float | None, latest: float) -> float:
    return latest if before is None else before + _RECENT * (latest - before)


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

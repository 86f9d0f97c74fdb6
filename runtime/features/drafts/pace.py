"""Measured costs of drafted rows and acceptance rates of drafts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Shares of a step's time. An unmeasured additional row costs half as much as a measured row, but at least `_HOPED`.
# Drafts of any length cost at least `_LEAST`, because their step needs a new plan.
_HOPED, _LEAST = 0.005, 0.03
# A step has at most this many drafted rows, or four times the largest number that was measured.
_TRIED = 8
_RECENT = 0.2
# Latest times kept for each kind of step, and the number from which on they are trusted.
_KEPT, _FEWEST = 5, 3
# Steps of a batch size after which a measured time is outdated.
_OLD = 128
# A step uses drafts only for a larger gain than this.
LEAST_GAIN = 1.02
# Steps between two measurements without drafts: at a gain of 1, for each additional 1, and at most.
_OFTEN, _SELDOM, _SELDOMEST = 8, 128, 128
# Tokens with a lower acceptance probability are never drafted.
_LEAST_CHANCE = 0.02


@dataclass(slots=True)
class _Cost:
    """Seconds and rows of the latest steps of one kind, and the number of the last one."""

    latest: list[tuple[float, int]] = field(default_factory=list)
    at: int = 0

    def note(self, seconds: float, rows: int, at: int) -> None:
        self.latest = [*self.latest[1 - _KEPT :], (seconds, rows)]
        self.at = at

    def known(self, now: int) -> bool:
        """Whether it was measured often enough and recently."""
        if now - self.at >= _OLD:  # one more measurement makes it known again
            self.latest = sorted(self.latest)[: _FEWEST - 1]
        return len(self.latest) >= _FEWEST

    @property
    def low(self) -> tuple[int, float]:
        """Rows and seconds of the fastest step: other load only makes steps slower."""
        seconds, rows = min(self.latest)
        return rows, seconds


class Pace:
    """Step time as a function of decoding requests and drafted rows.

    Steps with a similar number of requests share measurements.
    """

    def __init__(self) -> None:
        self._costs: dict[int, dict[int, _Cost]] = {}
        self._steps: dict[int, int] = {}
        self._before = (0, 0, 0)
        self._row_s: float | None = None  # seconds of a row in steps that also have prompt rows

    def note(self, requests: int, drafted: int, seconds: float, beside: int = 0) -> None:
        """Record a step. `beside`: its prompt rows."""
        follows, self._before = self._before == (requests, drafted, beside), (requests, drafted, beside)
        if beside:
            latest = seconds / (requests + drafted + beside)
            self._row_s = latest if self._row_s is None else self._row_s + _RECENT * (latest - self._row_s)
            return
        batch = _bucket(requests)
        self._steps[batch] = at = self._steps.get(batch, 0) + 1
        # Two equal steps in succession, so that periodic delays do not coincide with measurements.
        if drafted or follows:
            cost = self._costs.setdefault(batch, {}).setdefault(_bucket(drafted), _Cost())
            cost.note(seconds, requests + drafted, at)

    def seconds(self, requests: int, most: int, beside: int = 0) -> list[float] | None:
        """Expected seconds of steps with 0 to at most `most` drafted rows; None: steps without drafts are unmeasured.

        In a step with prompt rows (`beside`), a drafted row costs at least as much as a prompt row, because it delays
        prompts.
        """
        batch = _bucket(requests)
        costs, now = self._costs.get(batch, {}), self._steps.get(batch, 0)
        if 0 not in costs or not costs[0].known(costs[0].at) or (beside and self._row_s is None):
            return None
        # One slow step proves nothing: until a kind is known, the estimate comes from the known kinds.
        known = sorted(cost.low for drafted, cost in costs.items() if not drafted or cost.known(now))
        # More rows never take less time: if they seem to, other load delayed the step with fewer rows.
        for i in range(len(known) - 2, -1, -1):
            known[i] = known[i][0], min(known[i][1], known[i + 1][1])
        found = _lines(known, requests, min(most, max(_TRIED, 4 * (known[-1][0] - requests))))
        least, row_s = found[0] * (1 + _LEAST), self._row_s if beside and self._row_s else 0.0
        return [found[0], *(max(time, least, found[0] + row_s * rows) for rows, time in enumerate(found[1:], 1))]

    def due(self, requests: int, gain: float) -> bool:
        """Whether the next step should run without drafts, to measure its time.

        `gain`: tokens/s with drafts over tokens/s without; the smaller, the more often this is measured.
        """
        batch = _bucket(requests)
        age = self._steps[batch] - self._costs[batch][0].at
        return age >= min(max(_SELDOM * (gain - 1), _OFTEN), _SELDOMEST)


def _lines(known: Sequence[tuple[int, float]], first: int, most: int) -> list[float]:
    """Seconds of `first` to `first + most` rows, interpolated linearly between known points."""
    (least, time), (last, longest), points = known[0], known[-1], list(known)
    price = (longest - time) / (last - least) if last > least else 0.0
    if first < least:
        points.insert(0, (first, max(time - price * (least - first), time * first / least)))
    points.append((last + most, longest + max(_HOPED * time, price / 2) * most))
    rows, seconds = zip(*points, strict=True)
    found: list[float] = np.interp(np.arange(first, first + most + 1), rows, seconds).tolist()
    return found


def _bucket(number: int) -> int:
    """The upper end of a number's bucket: exact up to 4, then two buckets per power of two."""
    if number <= 4:
        return number
    half = 1 << (number - 1).bit_length() - 2
    return -(-number // half) * half


class Acceptance:
    """The probability that a drafted token is accepted, given that all before it were."""

    def __init__(self, prior: Acceptance | None = None, memory: int = 256):
        """`prior`: the initial estimate; `memory`: number of trials after which older ones count half."""
        self._prior, self._memory = prior, memory
        self._right, self._tried = (2.0, 4.0) if prior is None else (0.0, 0.0)

    @property
    def rate(self) -> float:
        if self._prior is None:
            return self._right / self._tried
        return (self._right + 4 * self._prior.rate) / (self._tried + 4)

    def note(self, right: int, drafted: int) -> None:
        """Record that the first `right` of `drafted` tokens were accepted."""
        self._right += right
        self._tried += right + (right < drafted)
        if self._tried > self._memory:
            self._right, self._tried = self._right / 2, self._tried / 2
        if self._prior is not None:
            self._prior.note(right, drafted)


def share_out(drafts: Sequence[tuple[float, int]], requests: int, seconds: Sequence[float]) -> tuple[list[int], float]:
    """Choose the number of rows of each draft that maximises the geometric mean of the requests' tokens/s.

    So drafts delay other requests only if the gain outweighs their loss.

    Args:
        drafts: acceptance rate and number of tokens of each.
        requests: number of requests in the step; each gets at least one token.
        seconds: expected duration of a step with 0, 1, ... drafted rows.

    Returns:
        The rows of each draft, and the ratio of this mean to the one without drafts.
    """
    # Heap by the gain of the next row: draft, expected tokens without it, acceptance probability, length of the draft.
    coming = [(-math.log1p(rate), i, 1.0, rate, 1) for i, (rate, _) in enumerate(drafts)]
    heapq.heapify(coming)
    taken: list[int] = []
    gained, most, best = 0.0, 0, 0.0
    for time in seconds[1:]:
        if not coming or coming[0][3] < _LEAST_CHANCE:
            break
        gain, i, tokens, chance, length = coming[0]
        taken.append(i)
        gained -= gain
        rate, longest = drafts[i]
        if length < longest:
            tokens, chance = tokens + chance, chance * rate
            heapq.heapreplace(coming, (-math.log1p(chance / tokens), i, tokens, chance, length + 1))
        else:
            heapq.heappop(coming)
        if (value := gained - requests * math.log(time / seconds[0])) > best:
            most, best = len(taken), value
    lengths = [0] * len(drafts)
    for i in taken[:most]:
        lengths[i] += 1
    return lengths, math.exp(best / requests)

"""Costs of longer steps and the success of drafts, as measured."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Share of a step's time that a further row costs at least where that is not known: half of what known ones do, but no
# less than the first figure. Drafts cost the second one at least, as their step is planned anew.
_HOPED, _LEAST = 0.005, 0.03
# Unknown steps have up to so many drafted rows, or four times as many as known ones.
_TRIED = 8
_RECENT = 0.2
# Times that are kept of one kind of step; with fewer than so many, it is not known.
_KEPT, _FEWEST = 5, 3
# Steps of a batch size after which a time is too old.
_OLD = 128
# Where drafts gain less, a step does without.
LEAST_GAIN = 1.02
# Steps between two measurements without drafts: at a gain of 1, for each 1 more, and at most.
_OFTEN, _SELDOM, _SELDOMEST = 8, 128, 128
# A less likely token is never drafted.
_LEAST_CHANCE = 0.02


@dataclass(slots=True)
class _Cost:
    """Seconds and rows of the latest steps of one kind, and when there was one."""

    latest: list[tuple[float, int]] = field(default_factory=list)
    at: int = 0

    def note(self, seconds: float, rows: int, at: int) -> None:
        self.latest = [*self.latest[1 - _KEPT :], (seconds, rows)]
        self.at = at

    def known(self, now: int) -> bool:
        """Whether it was measured often enough, and of late."""
        if now - self.at >= _OLD:  # one more shows whether it is as it was
            self.latest = sorted(self.latest)[: _FEWEST - 1]
        return len(self.latest) >= _FEWEST

    @property
    def low(self) -> tuple[int, float]:
        """Rows and seconds of the quickest: what else the machine does delays."""
        seconds, rows = min(self.latest)
        return rows, seconds


class Pace:
    """Seconds of a step by its requests that decode and its drafted rows.

    Steps of about as many requests are known together: there, a row costs the same whether it is drafted or not.
    """

    def __init__(self) -> None:
        self._costs: dict[int, dict[int, _Cost]] = {}
        self._steps: dict[int, int] = {}
        self._before = (0, 0, 0)
        self._row_s: float | None = None  # of a row beside those of prompts

    def note(self, requests: int, drafted: int, seconds: float, beside: int = 0) -> None:
        """`beside`: rows of prompts in the step."""
        follows, self._before = self._before == (requests, drafted, beside), (requests, drafted, beside)
        if beside:
            latest = seconds / (requests + drafted + beside)
            self._row_s = latest if self._row_s is None else self._row_s + _RECENT * (latest - self._row_s)
            return
        batch = _bucket(requests)
        self._steps[batch] = at = self._steps.get(batch, 0) + 1
        # Two in a row, so that no rhythm of delays falls together with that of measuring.
        if drafted or follows:
            cost = self._costs.setdefault(batch, {}).setdefault(_bucket(drafted), _Cost())
            cost.note(seconds, requests + drafted, at)

    def seconds(self, requests: int, most: int, beside: int = 0) -> list[float] | None:
        """Of steps with 0 to `most` drafted rows, or fewer; None: those without drafts are not known yet.

        Beside rows of prompts, those of a step in which all decode, had it rows at the price of theirs at least: only
        tokens that come cheaper than in later steps may let prompts wait.
        """
        batch = _bucket(requests)
        costs, now = self._costs.get(batch, {}), self._steps.get(batch, 0)
        if 0 not in costs or not costs[0].known(costs[0].at) or (beside and self._row_s is None):
            return None
        # One slow step says nothing: until a kind is known, it is hoped to be as cheap as others let it seem.
        known = sorted(cost.low for drafted, cost in costs.items() if not drafted or cost.known(now))
        # More rows never take less time: where they seem to, something else delayed the step with fewer.
        for i in range(len(known) - 2, -1, -1):
            known[i] = known[i][0], min(known[i][1], known[i + 1][1])
        found = _lines(known, requests, min(most, max(_TRIED, 4 * (known[-1][0] - requests))))
        least, row_s = found[0] * (1 + _LEAST), self._row_s if beside and self._row_s else 0.0
        return [found[0], *(max(time, least, found[0] + row_s * rows) for rows, time in enumerate(found[1:], 1))]

    def due(self, requests: int, gain: float) -> bool:
        """Whether a step should do without drafts, so that its time stays known.

        `gain`: how many such steps one with drafts is worth; the fewer, the more often one does without.
        """
        batch = _bucket(requests)
        age = self._steps[batch] - self._costs[batch][0].at
        return age >= min(max(_SELDOM * (gain - 1), _OFTEN), _SELDOMEST)


def _lines(known: Sequence[tuple[int, float]], first: int, most: int) -> list[float]:
    """Seconds at `first`, `first + 1`, ..., `first + most` rows on the lines through known points."""
    (least, time), (last, longest), points = known[0], known[-1], list(known)
    price = (longest - time) / (last - least) if last > least else 0.0
    if first < least:
        points.insert(0, (first, max(time - price * (least - first), time * first / least)))
    points.append((last + most, longest + max(_HOPED * time, price / 2) * most))
    rows, seconds = zip(*points, strict=True)
    found: list[float] = np.interp(np.arange(first, first + most + 1), rows, seconds).tolist()
    return found


def _bucket(number: int) -> int:
    """Up to 4 each count apart, above that two buckets an octave, each under its upper end."""
    if number <= 4:
        return number
    half = 1 << (number - 1).bit_length() - 2
    return -(-number // half) * half


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


def share_out(drafts: Sequence[tuple[float, int]], requests: int, seconds: Sequence[float]) -> tuple[list[int], float]:
    """Rows for each draft, so that the requests' tokens a second grow most in their geometric mean.

    So a draft delays requests without one only as far as the gain of its own outweighs their loss.

    Args:
        drafts: of each, the rate at which its next token is right, and its tokens.
        requests: of the step, each of which gets a token at least.
        seconds: of a step with 0, 1, ... drafted rows.

    Returns:
        The rows, and that mean over the one without drafts.
    """
    # By gain of the next row: tokens that are expected without it, its chance, its place in its draft.
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

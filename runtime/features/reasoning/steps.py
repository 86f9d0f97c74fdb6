"""Reasoning steps: splits an output at blank lines and compares the words of steps (ReasonCache, section IV-A1)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.features.reasoning.structure import open_fence

_DELIMITER = "\n\n"


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A closed step.

    Attributes:
        start, end: range of the step's tokens in the output, including the delimiter; `end` is exclusive.
        text: the text of these tokens.
        counts: how often each token id occurs.
        fence: the first line of the code fence within which the step begins; empty: it begins outside of a fence.
    """

    start: int
    end: int
    text: str
    counts: Mapping[int, int]
    fence: str = ""

    @property
    def formal_text(self) -> str:
        """The text, with the opening line of its code fence added if the step begins within a fence."""
        return f"{self.fence}\n{self.text}" if self.fence else self.text


class Splitter:
    """Cuts an output into steps, one token at a time.

    A step ends with the token that completes the first blank line after visible text. Further line breaks belong to the
    next step, so no step is blank.
    """

    def __init__(self) -> None:
        self._start = 0
        self._fence = ""
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._is_blank = True
        self._before = ""  # a line break at the end of the text so far, which may be half of a delimiter

    def push(self, token: int, text: str) -> Step | None:
        """Add the next token; returns the step that it closes, if any."""
        self._tokens.append(token)
        self._texts.append(text)
        if self._is_blank:
            text = text.lstrip()
        if not text:
            return None
        self._is_blank = False
        is_closed = _DELIMITER in self._before + text
        self._before = "\n" if text.endswith("\n") else ""
        return self._close() if is_closed else None

    def _close(self) -> Step:
        end, whole = self._start + len(self._tokens), "".join(self._texts)
        step = Step(self._start, end, whole, Counter(self._tokens), self._fence)
        self._start, self._fence = end, open_fence(step.formal_text)
        self._tokens, self._texts, self._is_blank, self._before = [], [], True, ""
        return step


def similarity(a: Step, b: Step) -> float:
    """Cosine of the bags of token ids, times the ratio of the shorter to the longer text in characters; 0 to 1."""
    few, many = sorted((a.counts, b.counts), key=len)
    dot = sum(count * many.get(token, 0) for token, count in few.items())
    norms = math.sqrt(_square(a.counts) * _square(b.counts))
    lengths = sorted((len(a.text), len(b.text)))
    return min(dot / norms, 1.0) * lengths[0] / lengths[1] if dot and lengths[1] else 0.0


def _square(counts: Mapping[int, int]) -> int:
    return sum(count * count for count in counts.values())


def threshold(scores: Sequence[float], tau_max: float, tau_min: float) -> float:
    """The score that an earlier step must exceed to pass. It falls as the mean of all scores rises.

    Args:
        scores: similarity of the new step to each earlier step; the threshold is `tau_max` if there are none.
        tau_max, tau_min: threshold for a mean score of 0 and of 1.
    """
    mean = sum(scores) / len(scores) if scores else 0.0
    return tau_max - (tau_max - tau_min) * mean

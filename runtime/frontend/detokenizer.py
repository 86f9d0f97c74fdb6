"""Incremental detokenization in whole characters, with stop strings."""

from __future__ import annotations

from runtime.models.tokenizer import Detokenizer, Tokenizer
from runtime.params import SamplingParams


class TextStream:
    """The text of one completion.

    Attributes:
        text: the text to show so far.
        stopped: the stop string that was found; the text ends there.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop = params.stop
        self._trim = not params.no_stop_trim
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, tokens: list[int], may_stop: bool = True, last: bool = False) -> str:
        """Add tokens; returns the text to show now.

        Args:
            tokens: new output tokens.
            may_stop: whether stop strings count (not before `min_new_tokens`).
            last: whether these are the last tokens, so that no text is held back.
        """
        if self.stopped is not None:
            return ""
        self._held += self._detokenizer.push(tokens)
        if last:
            self._held += self._detokenizer.flush()
        if may_stop and (found := self._find_stop()) is not None:
            at, self.stopped = found
            keep = at if self._trim else at + len(self.stopped)
        else:
            keep = len(self._held) if last else len(self._held) - self._suspect()
        delta, self._held = self._held[:keep], self._held[keep:]
        self.text += delta
        return delta

    def _find_stop(self) -> tuple[int, str] | None:
        """Position and text of the first stop string."""
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(found, key=lambda pair: pair[0]) if found else None

    def _suspect(self) -> int:
        """Length of the held text's longest suffix that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

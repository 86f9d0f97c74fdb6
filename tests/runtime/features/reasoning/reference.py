"""ReasonCache, read plainly from the paper: one sequence, transformers in float32, rows in place of pages.

A page of p tokens is rows [i * p, (i + 1) * p) of the cache in all layers. Sharing it means that another page's rows
are read in its place; here they are copied over it. Nothing is incremental, cached or asynchronous.

Where the paper is silent: S is the cosine times the ratio of lengths in characters; the threshold falls linearly with
the mean of S over all earlier steps; a page is compared with those whose ordinal within the other step differs from its
own by one at most. Two decisions are the engine's: of the steps that pass both filters four are compared, and steps are
looked at whenever a page is full, with the consequences some tokens later.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

# Of distances that are about 1: float32, in another order.
SLACK = 1e-4


@dataclass(frozen=True)
class Step:
    """A closed step: tokens [start, stop) of the output, and their text."""

    start: int
    stop: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Shared:
    """From `at` computed rows on, page `page` reads what lies in page `source`. Ordinals within the sequence."""

    at: int
    page: int
    source: int


@dataclass(frozen=True)
class Rules:
    """The paper's parameters."""

    page_size: int
    percentile: float = 80.0
    tau_max: float = 0.9
    tau_min: float = 0.6
    warm_up: int = 256
    most: int = 4
    late: int = 1


# -- section IV-A1: steps ----------------------------------------------------------------------------------------


def steps(ids: Sequence[int], texts: Sequence[str]) -> list[Step]:
    """The closed steps of an output whose tokens have these texts.

    A step ends with the token that ends the first "\\n\\n" behind its first visible character.
    """
    found, start = [], 0
    for stop in range(1, len(texts) + 1):
        text = "".join(texts[start:stop])
        if "\n\n" in text.lstrip():
            found.append(Step(start, stop, text, tuple(ids[start:stop])))
            start = stop
    return found


def score(a: Step, b: Step) -> float:
    """S: the cosine of the bags of tokens, times the ratio of the texts' lengths."""
    one, other = Counter(a.ids), Counter(b.ids)
    product = sum(count * other[token] for token, count in one.items())
    norms = math.prod(sum(count**2 for count in bag.values()) for bag in (one, other)) ** 0.5
    longer = max(len(a.text), len(b.text))
    return product / norms * min(len(a.text), len(b.text)) / longer if norms and longer else 0.0


def threshold(scores: Sequence[float], tau_max: float = 0.9, tau_min: float = 0.6) -> float:
    """Low where the steps repeat each other; `scores`: S of the current step and each step before it."""
    return tau_max - (tau_max - tau_min) * (sum(scores) / len(scores) if scores else 0.0)


def alike(step: Step, earlier: Sequence[Step], rules: Rules, formal: Callable[[str, str], bool]) -> list[Step]:
    """Earlier steps that pass both filters, the likest and of these the latest first.

    `formal`: whether the syntax trees of two texts agree.
    """
    scores = [score(step, one) for one in earlier]
    least = threshold(scores, rules.tau_max, rules.tau_min)
    places = [i for i, s in enumerate(scores) if s > least and formal(step.text, earlier[i].text)]
    return [earlier[i] for i in sorted(places, key=lambda i: (scores[i], i), reverse=True)][: rules.most]


# -- section IV-A2: pages ----------------------------------------------------------------------------------------


def pages_of(step: Step, prompt_len: int, page_size: int) -> range:
    """Pages of the sequence that lie wholly inside a step."""
    return range(-(-(prompt_len + step.start) // page_size), (prompt_len + step.stop) // page_size)


def pairs_of(mine: range, others: range) -> Iterator[tuple[int, int]]:
    """Pages that are compared: at the same ordinal in both steps, or at one beside it."""
    for ordinal, page in enumerate(mine):
        for other in (ordinal - 1, ordinal, ordinal + 1):
            if 0 <= other < len(others):
                yield page, others[other]


def may_share(distance: float, before: Sequence[float], percentile: float, warm_up: int = 256) -> bool:
    """Whether a distance is within the percentile of all before it; but for the percentile 100, after a warm-up."""
    is_warm = len(before) >= warm_up
    return percentile == 100 or (is_warm and distance <= float(np.percentile(before, percentile)))


# -- the model ---------------------------------------------------------------------------------------------------


class Reference:
    """A sequence that is computed token by token, and whose rows are replaced on the way."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(
        self, prompt: Sequence[int], output: Sequence[int], page_size: int, shared: Sequence[Shared] = ()
    ) -> torch.Tensor:
        """Compute a prompt, and then a given output behind it, with pages that read others from some rows on.

        Returns:
            Logits float32 [1 + len(output), vocab]: after the prompt, and after each token.
        """

        def between(rows: int, cache: DynamicCache) -> list[Shared]:
            return [one for one in shared if one.at == rows]

        return self._run(prompt, output, page_size, between, sorted({one.at for one in shared}))

    def _run(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        page_size: int,
        between: Callable[[int, DynamicCache], Sequence[Shared]],
        stops: Sequence[int],
    ) -> torch.Tensor:
        """`run`; `between` is called with some numbers of rows and the cache, and says what is shared from then on."""
        cache, tokens, start = DynamicCache(), [*prompt, *output], 0
        logits = []
        for stop in [*(rows for rows in stops if len(prompt) <= rows < len(tokens)), len(tokens)]:
            if stop > start:
                logits.append(self.model(torch.tensor([tokens[start:stop]]), past_key_values=cache).logits[0])
            start = stop
            if stop < len(tokens):
                for one in between(stop, cache):
                    self.replace(cache, one, page_size)
        return torch.cat(logits)[len(prompt) - 1 :]

    def replace(self, cache: DynamicCache, one: Shared, page_size: int) -> None:
        """Copy a page's rows over another page's, in all layers."""
        source, target = (rows_of(page, page_size) for page in (one.source, one.page))
        for layer in cache.layers:
            for rows in (layer.keys, layer.values):
                rows[:, :, target] = rows[:, :, source].clone()

    def distance(self, cache: DynamicCache, a: int, b: int, page_size: int) -> float:
        """D of two pages: mean over layers of (|dK| + |dV|) / (tokens x KV heads), Euclidean norms."""
        mine, other = (rows_of(page, page_size) for page in (a, b))
        total = 0.0
        for layer in cache.layers:
            difference = sum(float((x[0, :, mine] - x[0, :, other]).norm()) for x in (layer.keys, layer.values))
            total += difference / (page_size * layer.keys.shape[1])
        return total / len(cache.layers)

    # -- the whole system ----------------------------------------------------------------------------------------

    def serve(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        texts: Sequence[str],
        rules: Rules,
        formal: Callable[[str, str], bool],
        measured: list[float],
    ) -> tuple[list[Shared], torch.Tensor]:
        """Let a given output share pages by the paper's rules.

        Args:
            texts: of the output's tokens.
            formal: whether the syntax trees of two texts agree.
            measured: distances so far; new ones are added.

        Returns:
            What was shared, and the logits as of `run`.
        """
        closed, found, p = steps(output, texts), [], rules.page_size
        waiting: list[tuple[int, list[tuple[float, int, int]]]] = []
        looked = 0

        def between(rows: int, cache: DynamicCache) -> list[Shared]:
            nonlocal looked
            new = []
            while waiting and waiting[0][0] == rows:
                for distance, page, source in waiting.pop(0)[1]:
                    if may_share(distance, measured, rules.percentile, rules.warm_up):
                        new.append(Shared(rows, page, source))
                    measured.append(distance)
            while rows % p == 0 and looked < len(closed) and len(prompt) + closed[looked].stop <= rows:
                others = alike(closed[looked], closed[:looked], rules, formal)
                waiting.append((rows + rules.late, self.nearest(cache, closed[looked], others, len(prompt), rules)))
                looked += 1
            found.extend(new)
            return new

        stops = [rows for rows in range(len(prompt), len(prompt) + len(output)) if rows % p in (0, rules.late % p)]
        with torch.inference_mode():
            logits = self._run(prompt, output, p, between, stops)
        return found, logits

    def nearest(
        self, cache: DynamicCache, step: Step, others: Sequence[Step], prompt_len: int, rules: Rules
    ) -> list[tuple[float, int, int]]:
        """For each page of a step that has one like it in similar steps: the distance, the page, and that one."""
        best: dict[int, tuple[float, int, int]] = {}
        for other in others:
            pages = (pages_of(one, prompt_len, rules.page_size) for one in (step, other))
            for page, source in pairs_of(*pages):
                distance = self.distance(cache, page, source, rules.page_size)
                # Of pages that hold the same rows, which float32 may tell apart, the first is taken.
                if page not in best or distance < best[page][0] - SLACK:
                    best[page] = distance, page, source
        return [best[page] for page in sorted(best)]


def rows_of(page: int, page_size: int) -> slice:
    return slice(page * page_size, (page + 1) * page_size)


def distinct_share(num_rows: int, page_size: int, shared: Sequence[Shared]) -> float:
    """AMSR of one request: 1 - distinct / logical pages."""
    logical = -(-num_rows // page_size)
    held = {page: page for page in range(logical)}
    for one in sorted(shared, key=lambda one: one.at):
        held[one.page] = held[one.source]
    return 1 - len(set(held.values())) / logical

"""The evaluation of reasoning steps: from new tokens to pages that could be shared (ReasonCache, section IV-A)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from runtime.models.tokenizer import Tokenizer
from runtime.params import ReasoningParams
from runtime.reuse.reasoning.distance import Distances, Page
from runtime.reuse.reasoning.formal import agree
from runtime.reuse.reasoning.steps import Splitter, Step, similarity, threshold

# Steps whose pages are compared with those of a new one: the most alike, the latest first.
_MOST_CANDIDATES = 4
# Steps of each other request with which a new one is compared.
_MOST_OF_OTHERS = 64


@dataclass(slots=True, eq=False)
class Life:
    """A request's time between an admission and its release.

    Attributes:
        shifts: of substituted pages, by their place in the sequence: positions from where they were computed to where
            they are read; 0 where they are read with the rotation that they have.
        measured: pages with their squares, by place and id; a place has one page computed for it in a life.
    """

    shifts: dict[int, int] = field(default_factory=dict)
    measured: dict[tuple[int, int], Page] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Table:
    """A request's pages at one moment, by their places in the sequence; those before place `first` lie in the tree."""

    life: Life
    first: int
    pages: array[int]
    shifts: dict[int, int]

    def page(self, place: int, page_size: int) -> Page:
        """The page at a place."""
        key = place, self.pages[place]
        if (page := self.life.measured.get(key)) is None:
            page = self.life.measured[key] = Page(key[1], place * page_size - self.shifts.get(place, 0))
        return page


@dataclass(slots=True, eq=False)
class Thoughts:
    """A request to the evaluation, whose thread alone uses `splitter`, `output` and `steps`.

    Attributes:
        prompt_len: tokens before the output.
        params: of the request.
        random_share: for measurements: share of the pages that are replaced by random ones; 0: none is.
        table: at the last evaluation; None: before.
        output: tokens so far.
        steps: closed ones, in order.
    """

    prompt_len: int
    params: ReasoningParams
    random_share: float
    table: Table | None = None
    splitter: Splitter = field(default_factory=Splitter)
    output: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Match:
    """A page and the one that is most like it.

    Attributes:
        taker, place, page: the request that may give up a page, its place in the sequence, and the page.
        source, source_place, source_page: likewise, of the page that would be read instead.
        life, source_life: in which both were found.
        distance: of the pages; None: they were drawn at random.
        in_phase: whether both steps begin at the same row of a page.
    """

    taker: Thoughts
    place: int
    page: int
    life: Life
    source: Thoughts
    source_place: int
    source_page: int
    source_life: Life
    distance: float | None
    in_phase: bool = True


class Evaluation:
    """Splits outputs into steps, filters earlier steps for each, and measures their pages."""

    def __init__(self, distances: Distances, load_tokenizer: Callable[[], Tokenizer], page_size: int):
        """`load_tokenizer`: called at first use."""
        self._distances, self._load_tokenizer = distances, load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._page_size = page_size

    def evaluate(self, thoughts: Thoughts, table: Table, tokens: array[int], others: Sequence[Thoughts]) -> list[Match]:
        """The best match of each page of the steps that new tokens close.

        Args:
            thoughts: of the request.
            table: its pages now. In a new life the tokens are all of the output, and steps are looked for again.
            tokens: int32, those of the output that are new and whose KV is computed.
            others: requests whose steps count as earlier ones, too.
        """
        if thoughts.table is not None and thoughts.table.life is not table.life:
            thoughts.splitter, thoughts.output, thoughts.steps = Splitter(), [], []
        thoughts.table = table
        tokenizer = self._tokenizer = self._tokenizer or self._load_tokenizer()
        thoughts.output.extend(tokens)
        pushed = [thoughts.splitter.push(token, tokenizer.token_text(token)) for token in tokens]
        matches: list[Match] = []
        for step in (step for step in pushed if step is not None):
            # Some tokenizers say only of whole texts where spaces are.
            step = replace(step, text=tokenizer.decode(thoughts.output[step.start : step.end]))
            drawn = thoughts.random_share > 0
            matches += self._drawn(thoughts, step) if drawn else self._matches(thoughts, step, others)
            thoughts.steps.append(step)
        return matches

    def _matches(self, thoughts: Thoughts, step: Step, others: Sequence[Thoughts]) -> Iterator[Match]:
        assert thoughts.table is not None
        places = self._places(thoughts, step)
        own = range(max(places.start, thoughts.table.first), places.stop)
        candidates = self._candidates(thoughts, step, others) if own else []
        for place in own:
            at = place - places.start
            found = [m for owner, other in candidates for m in self._measure(thoughts, step, place, at, owner, other)]
            if found:
                yield min(found, key=lambda match: match.distance or 0.0)

    def _candidates(self, thoughts: Thoughts, step: Step, others: Sequence[Thoughts]) -> list[tuple[Thoughts, Step]]:
        """Earlier steps that pass both filters, with their requests."""
        earlier = [(owner, other) for owner in others for other in owner.steps[-_MOST_OF_OTHERS:]]
        earlier += [(thoughts, other) for other in thoughts.steps]
        scores = [similarity(step, other) for _, other in earlier]
        least = threshold(scores, thoughts.params.tau_max, thoughts.params.tau_min)
        alike = [i for i, score in enumerate(scores) if score > least]
        alike.sort(key=lambda i: (scores[i], i), reverse=True)
        found: list[tuple[Thoughts, Step]] = []
        for i in alike:
            if len(found) < _MOST_CANDIDATES and agree(step.formal_text, earlier[i][1].formal_text):
                found.append(earlier[i])
        return found

    def _measure(
        self, thoughts: Thoughts, step: Step, place: int, at: int, owner: Thoughts, other: Step
    ) -> Iterator[Match]:
        """The page at a place against those at about the same place `at` of another step."""
        assert thoughts.table is not None
        assert owner.table is not None
        page = thoughts.table.page(place, self._page_size)
        places = self._places(owner, other)
        begins = (one.prompt_len + s.start for one, s in ((thoughts, step), (owner, other)))
        in_phase = len({begin % self._page_size for begin in begins}) == 1
        # The lock of another request on pages of the tree may end before this one.
        first = 0 if owner is thoughts else owner.table.first
        for near in places[max(at - 1, 0) : at + 2]:
            if near < first:
                continue
            source = owner.table.page(near, self._page_size)
            if source is not page:
                distance = self._distances.between(page, source, thoughts.params.rotation == "moved")
                lives = thoughts.table.life, owner.table.life
                yield Match(thoughts, place, page.id, lives[0], owner, near, source.id, lives[1], distance, in_phase)

    def _places(self, thoughts: Thoughts, step: Step) -> range:
        """The whole pages within a step, by their places in the sequence."""
        first, stop = thoughts.prompt_len + step.start, thoughts.prompt_len + step.end
        return range(-(-first // self._page_size), stop // self._page_size)

    def _drawn(self, thoughts: Thoughts, step: Step) -> Iterator[Match]:
        """Matches at random among earlier pages of the output: the control of the paper's evaluation."""
        table = thoughts.table
        assert table is not None
        first = -(-thoughts.prompt_len // self._page_size)
        draw = random.Random(thoughts.prompt_len + step.start)
        for place in self._places(thoughts, step):
            if place > first and draw.random() < thoughts.random_share and place >= table.first:
                near = draw.randrange(first, place)
                page, source = table.pages[place], table.pages[near]
                yield Match(thoughts, place, page, table.life, thoughts, near, source, table.life, None)

"""The collaborative filter finds pages of new tokens that could be shared (ReasonCache, section IV-A)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from runtime.features.reasoning.ask import ReasoningAsk
from runtime.features.reasoning.distance import Distances, MeasuredPage
from runtime.features.reasoning.steps import Splitter, Step, similarity, threshold
from runtime.features.reasoning.structure import equivalent
from runtime.models.tokenizer import Tokenizer

# Most earlier steps whose pages are compared with a new step's: the most similar, and of equal ones the latest.
_MOST_CANDIDATES = 4


@dataclass(slots=True, eq=False)
class StepHistory:
    """The steps of a request's output since its admission. Only the filter's thread reads or changes this object.

    Attributes:
        prompt_len: number of tokens before the output.
        output: output tokens so far.
        steps: closed steps, in order.
        measured: pages by (index in the sequence, page id). During one admission, such a page never changes its KV.
    """

    prompt_len: int
    params: ReasoningAsk
    splitter: Splitter = field(default_factory=Splitter)
    output: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    measured: dict[tuple[int, int], MeasuredPage] = field(default_factory=dict)

    def page(self, index: int, page_id: int) -> MeasuredPage:
        return self.measured.setdefault((index, page_id), MeasuredPage(page_id))


@dataclass(slots=True, frozen=True)
class PageMatch:
    """A page and an earlier page that could replace it.

    Attributes:
        index, page: the page's index in the sequence, and its id.
        source_index, source_page: index and id of the earlier page.
        distance: their distance D, see `Distances`.
    """

    index: int
    page: int
    source_index: int
    source_page: int
    distance: float


class CollaborativeFilter:
    """Splits an output into steps, and compares the pages of each step with the pages of similar earlier steps."""

    def __init__(self, distances: Distances, load_tokenizer: Callable[[], Tokenizer], page_size: int):
        """`load_tokenizer`: called once, at the first evaluation."""
        self._distances, self._load_tokenizer = distances, load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._page_size = page_size

    def evaluate(self, history: StepHistory, pages: array[int], first: int, tokens: array[int]) -> list[PageMatch]:
        """The best match of each page in the steps that new tokens close.

        Args:
            history: the request's history, which is updated.
            pages: the request's int32 page ids now. Pages before index `first` are in the tree and never replaced.
            tokens: int32, the new output tokens, whose KV is computed.
        """
        tokenizer = self._tokenizer = self._tokenizer or self._load_tokenizer()
        history.output.extend(tokens)
        pushed = [history.splitter.push(token, tokenizer.token_text(token)) for token in tokens]
        matches: list[PageMatch] = []
        for step in (step for step in pushed if step is not None):
            # With some tokenizers, the texts of single tokens lack spaces that the whole text has.
            step = replace(step, text=tokenizer.decode(history.output[step.start : step.end]))
            matches += self._matches(history, step, pages, first)
            history.steps.append(step)
        return matches

    def _matches(self, history: StepHistory, step: Step, pages: array[int], first: int) -> Iterator[PageMatch]:
        inside = self._inside(history, step)
        own = range(max(inside.start, first), inside.stop)
        candidates = _candidates(history, step) if own else []
        for index in own:
            ordinal = index - inside.start
            near = max(ordinal - 1, 0), ordinal + 2
            sources = [source for other in candidates for source in self._inside(history, other)[slice(*near)]]
            found = [self._measure(history, pages, index, source) for source in sources]
            if found:
                yield min(found, key=lambda match: match.distance)

    def _inside(self, history: StepHistory, step: Step) -> range:
        """Indices in the sequence of the pages that lie completely within a step."""
        first, stop = history.prompt_len + step.start, history.prompt_len + step.end
        return range(-(-first // self._page_size), stop // self._page_size)

    def _measure(self, history: StepHistory, pages: array[int], index: int, source: int) -> PageMatch:
        mine, other = history.page(index, pages[index]), history.page(source, pages[source])
        return PageMatch(index, mine.id, source, other.id, self._distances.between(mine, other))


def _candidates(history: StepHistory, step: Step) -> list[Step]:
    """Earlier steps that pass the lexical and the structural filter, most similar first."""
    earlier, params = history.steps, history.params
    scores = [similarity(step, other) for other in earlier]
    least = threshold(scores, params.tau_max, params.tau_min)
    alike = [i for i, score in enumerate(scores) if score > least]
    alike.sort(key=lambda i: (scores[i], i), reverse=True)
    found: list[Step] = []
    for i in alike:
        if len(found) < _MOST_CANDIDATES and equivalent(step.formal_text, earlier[i].formal_text):
            found.append(earlier[i])
    return found

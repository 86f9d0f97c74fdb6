"""The tables of `ramet bench bicache`: results of each case, gains of reuse, all cells together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.table import Table

from loadgen.accuracy.cases import BICACHE, BY_TABLE, COMBINED, NO_CACHE, WITHIN, Case, Plan
from loadgen.accuracy.measure import Outcome
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.micro.cost_model import modelled_passes
from loadgen.micro.intervals import wilson

Row = tuple[Case, Outcome]

# Outcomes of one list of a task by case, summed over its ratios, which depend on each other.
Cluster = dict[str, Outcome]

_DRAWS = 2000

_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "exact %": lambda o: f"{_exact(o):.1f}",
    "tokens right %": lambda o: f"{100 * o.right / o.tokens:.1f}",
    "tokens/s": lambda o: f"{_speed(o):.1f}",
    "rows/answer": lambda o: f"{o.rows / o.answers:.0f}",
    "depth": lambda o: str(o.depth),
}


@dataclass(frozen=True, slots=True)
class Section:
    """A table with a title; the first cell of a row is its name, and that column has no head."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]

    def table(self) -> Table:
        """For the terminal."""
        return make_table(self.title, ("", *self.columns), self.rows)

    def markdown(self) -> str:
        """For a file."""
        return f"{self.title}\n\n{markdown_table(['', *self.columns], self.rows)}"


def show(sections: Sequence[Section], published: str) -> str:
    """Print tables and the published figures; both in Markdown."""
    console = wide_console()
    for section in sections:
        console.print(section.table())
    console.print(published)
    return "\n".join([*(section.markdown() for section in sections), f"{published}\n"])


def case_section(title: str, rows: Sequence[Row]) -> Section:
    """Results of each case of a cell."""
    filled = [[case.name, *(column(outcome) for column in _COLUMNS.values())] for case, outcome in rows]
    return Section(title, list(_COLUMNS), filled)


def gain_section(cells: Sequence[tuple[str, Sequence[Row]]], plan: Plan) -> Section:
    """Ratios of tokens/s, for each cell by its name: BiCache to no cache and d = 0, and combined to Fast-dLLM alone."""
    filled = []
    for name, rows in cells:
        of = {case.name: outcome for case, outcome in rows}
        gain, model = _speed(of[BICACHE]) / _speed(of[NO_CACHE]), 1 / modelled_cost(of[BICACHE], plan)
        beaten = [_speed(of[BICACHE]) / _speed(of[WITHIN])]
        beaten += [_speed(of[both]) / _speed(of[alone]) for alone, both in COMBINED.items()]
        filled.append([name, *(f"{value:.2f}" for value in (gain, model, gain / model, *beaten))])
    columns = ["BiCache over no cache", "cost model", "share of it", "over d = 0"]
    columns += [f"with {alone} over it alone" for alone in COMBINED]
    return Section("times the tokens/s", columns, filled)


def modelled_cost(outcome: Outcome, plan: Plan) -> float:
    """A step's share of the rows of a whole pass, for BiCache at the outcome's depth and ratio."""
    refreshes = 1 / plan.interval
    return modelled_passes(refreshes, 1 - refreshes, outcome.ratio, outcome.depth / plan.layers)


def pooled_section(clusters: Sequence[Cluster], seed: int = 0) -> Section:
    """Sums over all cells, and the difference of right answers to no cache, in points.

    The interval of the difference is by a bootstrap over the clusters.
    """
    rng = np.random.default_rng(seed)
    filled = []
    for name in clusters[0]:
        total = Outcome.total(cluster[name] for cluster in clusters)
        row = [f"{total.exact} of {total.answers}", f"{_exact(total):.1f}", f"{100 * total.right / total.tokens:.1f}"]
        filled.append([name, *row, *_difference(clusters, name, rng)])
    columns = ["answers right", "exact %", "tokens right %", "points to no cache", "95 % interval"]
    return Section("all tasks and ratios", columns, filled)


def measured_section(title: str, clusters: Sequence[Cluster], seed: int = 0) -> Section:
    """Sums over lists, and right answers, rows and tokens for each CPU second beside those of the table.

    Intervals of differences are by a bootstrap over the lists; that of the answers, which knows nothing of the lists,
    is Wilson's.
    """
    rng = np.random.default_rng(seed)
    filled = []
    for name in clusters[0]:
        of, base = ([cluster[one] for cluster in clusters] for one in (name, BY_TABLE))
        total = Outcome.total(of)
        shares = [100 * share for share in wilson(total.exact, total.answers)]
        row = [f"{total.exact} of {total.answers}", f"{shares[0]:.0f} to {shares[1]:.0f} %"]
        row += [f"{100 * total.right / total.tokens:.1f}", *_difference(clusters, name, rng, BY_TABLE)]
        row += [f"{total.rows / total.answers:.0f}", f"{total.generated / total.cpu_s:.1f}"]
        draws = rng.integers(len(clusters), size=(_DRAWS, len(clusters)))
        spent, spent_base = (np.array([outcome.cpu_s for outcome in outcomes]) for outcomes in (of, base))
        low, high = np.percentile(spent_base[draws].sum(1) / spent[draws].sum(1), (2.5, 97.5))
        times = [f"{spent_base.sum() / spent.sum():.2f}", f"{low:.2f} to {high:.2f}"]
        filled.append([name, *row, *(["", ""] if name == BY_TABLE else times)])
    columns = [
        "answers right",
        "95 % interval",
        "tokens right %",
        "points to the table",
        "95 % interval",
        "rows/answer",
    ]
    return Section(title, [*columns, "tokens/CPU s", "times the table's", "95 % interval"], filled)


def account_section(title: str, clusters: Sequence[Cluster]) -> Section:
    """Mean rows of the requests of a list in their order, and what they are for, of the cases that reuse a prefix."""
    filled: list[list[str]] = []
    columns: list[str] = []
    for name in clusters[0]:
        parts = np.array(Outcome.total(cluster[name] for cluster in clusters).parts) / len(clusters)
        if parts.size:
            ends = [0, *(2**n for n in range(20) if 2**n < len(parts)), len(parts)]
            places = list(pairwise(ends))
            columns = [f"{a + 1}" if b == a + 1 else f"{a + 1} to {b}" for a, b in places]
            means = [*(parts[a:b].sum(1).mean() for a, b in places), *parts.mean(0)]
            filled.append([name, *(f"{mean:.0f}" for mean in means)])
    kinds = [f"for {kind}" for kind in ("the encoding", "rows behind the prefix", "refreshes", "measuring")]
    return Section(title, [*(f"request {place}" for place in columns), *kinds], filled)


def _difference(clusters: Sequence[Cluster], name: str, rng: np.random.Generator, base: str = NO_CACHE) -> list[str]:
    if name == base:
        return ["", ""]
    more = np.array([cluster[name].exact - cluster[base].exact for cluster in clusters])
    answers = np.array([cluster[name].answers for cluster in clusters])
    draws = rng.integers(len(clusters), size=(_DRAWS, len(clusters)))
    low, high = np.percentile(100 * more[draws].sum(1) / answers[draws].sum(1), (2.5, 97.5))
    return [f"{100 * more.sum() / answers.sum():+.1f}", f"{low:+.1f} to {high:+.1f}"]


def _exact(outcome: Outcome) -> float:
    return 100 * outcome.exact / outcome.answers


def _speed(outcome: Outcome) -> float:
    return outcome.generated / outcome.seconds

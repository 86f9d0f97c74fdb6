"""The summaries of the table: gains beside the cost model's, and all cells together with their interval."""

from __future__ import annotations

import pytest

from loadgen.accuracy.cases import BICACHE, BY_TABLE, COMBINED, NO_CACHE, WITHIN, Case, Plan, table_cases
from loadgen.accuracy.measure import Outcome
from loadgen.accuracy.sections import account_section, gain_section, measured_section, modelled_cost, pooled_section

PLAN = Plan(room=32, steps=32, block=8, interval=4, threshold=0.9, depth=None, layers=30)


def outcome(exact=1, seconds=1.0, ratio=0.5, depth=0):
    return Outcome(answers=2, exact=exact, tokens=20, right=15, generated=64, seconds=seconds, depth=depth, ratio=ratio)


def test_the_cost_model_has_its_limits():
    def cost(interval, **fields):
        return modelled_cost(outcome(**fields), Plan(32, 32, 8, interval, 0.9, None, 30))

    assert cost(1, depth=0) == 1
    assert cost(1, depth=30, ratio=0.75) == cost(8, depth=30, ratio=0.75) == 0.25
    # Of four steps, one over all but a fifth of half the rows, three over the other half.
    assert cost(4, depth=6, ratio=0.5) == pytest.approx((1 * 0.9 + 3 * 0.5) / 4)


def test_gains_are_of_the_speeds():
    seconds = {NO_CACHE: 9.0, WITHIN: 4.0, BICACHE: 3.0}
    for times, (alone, both) in enumerate(COMBINED.items(), 2):
        seconds |= {alone: float(times), both: 1.0}
    rows = [(Case(name, {}), outcome(seconds=s, depth=6)) for name, s in seconds.items()]
    section = gain_section([("keep", rows)], PLAN)
    model = 1 / modelled_cost(rows[2][1], PLAN)
    [row] = section.rows
    assert row == ["keep", "3.00", f"{model:.2f}", f"{3 / model:.2f}", "1.33", "2.00", "3.00"]
    assert len(section.columns) == len(row) - 1


def test_differences_are_between_answers_about_the_same_lists():
    names = [case.name for case in table_cases(PLAN)]
    better = [{name: outcome(exact=1 + (name == BICACHE)) for name in names} for _ in range(4)]
    rows = {row[0]: row[1:] for row in pooled_section(better).rows}
    assert list(rows) == names
    assert rows[NO_CACHE] == ["4 of 8", "50.0", "75.0", "", ""]
    assert rows[BICACHE] == ["8 of 8", "100.0", "75.0", "+50.0", "+50.0 to +50.0"]
    assert rows[WITHIN][-2:] == ["+0.0", "+0.0 to +0.0"]
    mixed = [*better, *({**cluster, BICACHE: outcome(exact=0)} for cluster in better)]
    points, interval = {row[0]: row[1:] for row in pooled_section(mixed).rows}[BICACHE][-2:]
    low, high = (float(bound) for bound in interval.split(" to "))
    assert points == "+0.0"
    assert -50 <= low < 0 < high <= 50


def test_what_is_measured_in_serving_is_compared_with_the_table():
    def of(exact, cpu_s):
        return Outcome(answers=4, exact=exact, tokens=20, right=15, generated=64, cpu_s=cpu_s, rows=400)

    clusters = [{BY_TABLE: of(2, 8.0), "measured": of(3, cpu_s)} for cpu_s in (4.0, 2.0, 4.0)]
    rows = {row[0]: row[1:] for row in measured_section("keep", clusters).rows}
    # Wilson's interval of 6 of 12: (0.5 + z^2 / 24 -+ z sqrt(1 / 48 + z^2 / 576)) / (1 + z^2 / 12) = 0.5 -+ 0.2460.
    assert rows[BY_TABLE] == ["6 of 12", "25 to 75 %", "75.0", "", "", "100", "8.0", "", ""]
    of_measured = ["9 of 12", "47 to 91 %", "75.0", "+25.0", "+25.0 to +25.0", "100", "19.2", "2.40"]
    assert rows["measured"][:8] == of_measured
    low, high = (float(bound) for bound in rows["measured"][8].split(" to "))
    assert 2 <= low < 2.4 < high <= 4


def test_rows_are_told_by_request_and_by_their_purpose():
    def of(*parts):
        return Outcome(answers=5, parts=[list(map(float, each)) for each in parts])

    first, later, last = (8, 10, 4, 6), (0, 10, 4, 0), (0, 10, 2, 0)
    clusters = [{"measured": of(first, later, later, last, last), NO_CACHE: of()} for _ in range(2)]
    section = account_section("keep", clusters)
    assert section.columns[:4] == ["request 1", "request 2", "request 3 to 4", "request 5"]
    [row] = section.rows
    assert row == ["measured", "28", "14", "13", "12", "2", "10", "3", "1"]

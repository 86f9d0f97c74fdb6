"""Verdicts on runs: how much slower, and why."""

from __future__ import annotations

import pytest

from loadgen.http.record import Record
from loadgen.http.verdict import beside, cold_s, of_run


def runs(first_s: float, cached: int = 0, queue_s: float = 0.0, number: int = 10) -> list[Record]:
    """Requests a second after each other, all alike."""
    return [
        Record(i, scheduled_s=i, sent_s=i, first_s=i + first_s, end_s=i + first_s + 1, arrivals_s=[i + first_s],
               prompt_tokens=100, cached_tokens=cached, output_tokens=10, queue_s=queue_s, prefill_s=0.01)
        for i in range(number)
    ]  # fmt: skip


def test_a_run_in_a_sentence():
    records = [*runs(0.25, cached=80), Record(10, scheduled_s=10, end_s=10.5, error="timeout")]
    assert of_run(records) == (
        "Half of the requests had their first token within 250 ms, 99 % within 250 ms; 10 output tokens/s; "
        "80% of the prompt tokens came from the cache; 1 of 11 requests failed."
    )
    assert of_run([Record(0, error="timeout")]) == "None of 1 requests was answered."


@pytest.mark.parametrize(
    ("mine", "base", "words"),
    [
        ((0.31, 10), (0.1, 90), "3.1 times slower to the first token than A, because 10% of its prompt tokens"),
        ((0.1, 90), (0.31, 10), "3.1 times faster to the first token than A, because 90% of its prompt tokens"),
        ((0.5, 50, 0.4), (0.1, 50), "5.0 times slower to the first token than A, because its requests waited 400 ms"),
        ((0.5, 50), (0.1, 50), "5.0 times slower to the first token than A; it has"),
        ((0.1, 50), (0.1, 50), "as quick to the first token as A; it has 1.00 times the output tokens/s"),
        ((0.2, 90), (0.1, 50), "2.0 times slower to the first token than A; it has"),
    ],
)
def test_one_beside_another(mine, base, words):
    assert f"B is {words}" in beside("B", runs(*mine), "A", runs(*base))
    assert "cannot be compared" in beside("B", [], "A", runs(*base))


def test_the_cold_start_ends_with_the_first_hit():
    records = runs(0.1)
    assert cold_s(records) is None
    records[4].cached_tokens = 5
    assert cold_s(records) == 4

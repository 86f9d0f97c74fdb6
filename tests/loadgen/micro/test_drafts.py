"""`ramet bench drafts` on a small model: both ways of a task, and a grammar that holds the model to its answer."""

from __future__ import annotations


def test_both_ways_answer_the_same_questions(measured, tiny_dir):
    small = ["--dtype", "float32", "--tasks", "edit", "again", "--clients", 2, "--output", 16, "--questions", 1]
    found = measured("drafts", "--model", tiny_dir, *small, repeats=2)
    assert sorted((one["task"], one["drafts"]) for one in found) == [
        (task, way) for task in ("again", "edit") for way in ("auto", "off") for _ in "12"
    ]
    for one in found:
        assert min(one["rate"], one["by_cpu"]) > 0
        assert (one["drafted"] == 0) == (one["drafts"] == "off")
        assert 0 <= one.get("right", 0) <= 1

"""Prompts with documents on a small model: rows by the formula, and pages of a document that many read."""

import random

import pytest

from loadgen.experiments.micro.documents import FULL, PREFIX, Documents, Shape
from loadgen.offline.document_methods import METHODS, row_layers, ways
from runtime.params import ReuseParams

SHAPE = Shape(length=72, system=20, question=9)


@pytest.fixture(scope="module")
def bench(tiny_dir):
    bench = Documents(tiny_dir, 3, SHAPE, dtype="float32", pool_tokens=8192, debug_invariants=True)
    yield bench
    bench.close()


def test_every_way_computes_as_many_rows_as_the_formula_has(bench):
    """With single rows; of whole pages a method takes as many as fit."""
    every = ways(METHODS, [0, 0.3, 1], ["token", "page"])
    layers, page = bench.core.executor.spec.num_layers, 16
    full = bench.first(3, FULL, None, random.Random(0))
    assert full["formula"] == (20 - page + 3 * 72 + 9) * layers
    assert 0 <= full["formula"] - full["row_layers"] <= 4 * layers, "the system prompt"
    for name, asked in every.items():
        mine = bench.first(3, name, asked, random.Random(0))
        fits = asked.granularity == "token" or asked.method in ("pie", "full", "legolink")
        least = mine["formula"] if fits else mine["formula"] - page * layers
        assert least <= mine["row_layers"] <= mine["formula"], name
    assert bench.first(3, PREFIX, None, random.Random(0))["row_layers"] <= full["formula"]


def test_a_first_document_has_no_rows_that_legolink_computes_again(bench):
    prompt = bench.prompt(bench.order(3, random.Random(0)))
    prompt.documents[0] = (0, prompt.documents[0][1])
    one, layers = ReuseParams(method="legolink", k=16), bench.core.executor.spec.num_layers
    assert row_layers(one, prompt, 16, layers) == (9 + 16 + 16) * layers


@pytest.mark.parametrize("method", ["pie", "cacheblend"])
def test_a_document_that_many_read_lies_in_the_pool_once(bench, method):
    asked = ReuseParams(method=method)
    one, four = bench.pages(asked, 1), bench.pages(asked, 4)
    assert one >= 5 + 1 + 1
    alone = one - 5 - 1  # besides the document's pages and the prefix
    assert 3 * alone <= four - one <= 3 * (alone + 1), "each has its own rows alone, and what it decoded meanwhile"


def test_orders_do_not_come_again_before_all_were_drawn(bench):
    bench._orders.clear()
    assert len({tuple(one.tobytes() for one in bench.order(3, random.Random(seed))) for seed in range(6)}) == 6
    assert bench.order(3, random.Random(2)) == bench.order(3, random.Random(2)), "equal draws, equal orders"
    bench.order(3, random.Random(7))

"""Candidate pages where a part of the output lies in the tree, on a pool whose contents are drawn."""

from array import array

import torch

from runtime.asks import ReasoningAsk
from runtime.features.reasoning.distance import Distances
from runtime.features.reasoning.filtering import CollaborativeFilter, StepHistory
from runtime.kv.pool import KVPool
from tests.runtime.features.reasoning.driver import load_tokenizer

ROWS = 4


def test_pages_of_the_tree_are_read_and_not_given_up(tiny_dir):
    pool = KVPool(2, 64, ROWS, 2, 8, torch.float32, torch.device("cpu"))
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.randn(tensor.shape))
    tokenizer, pages = load_tokenizer(tiny_dir), array("i", range(63, 0, -1))
    filters, history = CollaborativeFilter(Distances(pool), lambda: tokenizer, ROWS), StepHistory(4, ReasoningAsk())
    step = "So we see that it is so and so it goes on and on in this way as long as it will.\n\n"
    tokens = array("i", tokenizer.encode(step, add_special_tokens=False))
    assert len(tokens) % ROWS == 0, "both steps begin at a page"
    places = len(tokens) // ROWS
    filters.evaluate(history, pages, 0, tokens)
    first = 1 + places + 3
    matches = filters.evaluate(history, pages, first, tokens)
    assert {match.index for match in matches} == set(range(first, 1 + 2 * places))
    assert min(match.source_index for match in matches) < 1 + places

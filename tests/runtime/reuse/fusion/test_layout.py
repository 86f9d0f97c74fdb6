"""Options of a request that reads documents, as its answer repeats them."""

from __future__ import annotations

import pytest

from runtime.reuse.fusion.layout import Asked


@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ({"select": "legolink", "k": 3}, {"ratio": None, "k": 3}),
        ({"select": "legolink", "ratio": 0.5}, {"ratio": 0.5}),
        ({"select": "a3", "ratio": 0.3}, {"ratio": 0.3}),
    ],
)
def test_the_options_that_chose_the_rows_are_named(asked, own):
    found = Asked.read({**asked, "documents": [[0, 8]], "chunk_tokens": 32, "granularity": "token"}, 9)
    assert found.options() == {"granularity": "token", "chunk_tokens": 32, **own}

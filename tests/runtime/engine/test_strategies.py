"""Strategies are opened when they are first asked for."""

from types import SimpleNamespace

import pytest

from runtime.engine.strategies import Strategies


def test_a_question_opens_none_and_the_failure_of_an_opener_is_its_own():
    opened = []

    def fail():
        raise KeyError("a tensor")

    default = SimpleNamespace(name="prefix")
    strategies = Strategies(default, {"chunks": lambda: opened.append(1) or default, "reasoncache": fail})
    assert [name in strategies for name in ("prefix", "chunks", "reasoncache", "other")] == [True, True, True, False]
    assert (opened, [*strategies.opened]) == ([], ["prefix"])
    assert strategies["chunks"] is strategies["chunks"]
    assert opened == [1]
    ask = SimpleNamespace(__struct_config__=SimpleNamespace(tag="reasoncache"))
    with pytest.raises(KeyError, match="a tensor"):
        strategies.serving(ask)

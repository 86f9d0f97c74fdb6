"""Limits on open requests and waiting tokens: at each bound, for the server and for each key."""

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import Overloaded, RateLimited
from runtime.frontend.limits import RequestLimits


class FewTokens(SchedulerConfig):
    """Limits with another bound on waiting prompt tokens than the server's."""

    tokens: int = 100

    @property
    def max_waiting_tokens(self) -> int:
        return self.tokens


def make_limits(**options) -> RequestLimits:
    """Ten places in all, and a hundred tokens."""
    return RequestLimits(FewTokens(max_running=4, max_waiting=6, **options))


def fill(limits: RequestLimits, account: str, completions: int, tokens: int = 0) -> RequestLimits:
    for _ in range(completions):
        limits.enter(account, tokens)
    return limits


def refusal(limits: RequestLimits, account: str, completions: int, tokens: int) -> str:
    """The message and the kind of a refusal; empty if there is none."""
    try:
        limits.check(account, completions, tokens)
    except (Overloaded, RateLimited) as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


def test_places_of_an_open_server():
    limits = fill(make_limits(), "", 7)
    assert refusal(limits, "", 3, 0) == ""
    assert refusal(limits, "", 4, 0) == "Overloaded: 7 requests are open; the limit is 10; try again"
    assert refusal(make_limits(), "", 11, 0).startswith("Overloaded: 0 requests are open")


def test_places_of_a_key():
    limits = fill(make_limits(), "a", 3)
    assert refusal(limits, "a", 2, 0) == ""
    assert refusal(limits, "a", 3, 0) == "RateLimited: this key has 3 open requests; the limit is 5"
    assert refusal(limits, "b", 5, 0) == ""
    assert "RateLimited" in refusal(limits, "b", 6, 0)
    fill(limits, "b", 5)
    assert refusal(limits, "c", 2, 0) == ""
    assert "Overloaded" in refusal(limits, "c", 3, 0), "all keys together have no more than the server"


def test_configured_places_of_a_key():
    limits = make_limits(key_share=0.7)
    assert [limits.most_open(account) for account in ("a", "")] == [7, 10]
    assert refusal(fill(limits, "a", 6), "a", 1, 0) == ""
    assert "the limit is 7" in refusal(limits, "a", 2, 0)
    assert [make_limits().most_open(account) for account in ("a", "")] == [5, 10]
    single = RequestLimits(SchedulerConfig(max_running=1, max_waiting=1))
    assert single.most_open("a") == 1


def test_waiting_tokens_of_the_server():
    limits = fill(make_limits(), "", 1, 60)
    assert refusal(limits, "", 1, 40) == ""
    assert refusal(limits, "", 1, 41) == "Overloaded: 60 prompt tokens are waiting; the limit is 100"
    assert refusal(make_limits(), "", 1, 9_999) == "", "one may always wait"


def test_waiting_tokens_of_a_key():
    limits = fill(make_limits(), "a", 1, 30)
    assert refusal(limits, "a", 1, 20) == ""
    assert refusal(limits, "a", 1, 21) == "RateLimited: 30 prompt tokens of this key are waiting; the limit is 50"
    assert refusal(limits, "b", 1, 70) == "", "its first may be longer than its share"
    assert "Overloaded: 30" in refusal(limits, "b", 1, 71)
    assert "the limit is 40" in refusal(fill(make_limits(key_share=0.4), "a", 1, 30), "a", 1, 11)
    assert refusal(fill(make_limits(key_share=0.4), "a", 1, 30), "a", 1, 10) == ""


def test_what_has_begun_no_longer_waits_and_what_has_ended_is_no_longer_open():
    limits = fill(fill(make_limits(), "a", 2, 20), "b", 1, 5)
    assert (limits.open, limits.waiting_tokens) == ({"a": 2, "b": 1}, {"a": 40, "b": 5})
    limits.begin("a", 20)
    assert (limits.open["a"], limits.waiting_tokens["a"]) == (2, 20)
    limits.begin("a", 20)
    limits.leave("a")
    assert (limits.open, limits.waiting_tokens) == ({"a": 1, "b": 1}, {"b": 5})
    limits.leave("a")
    limits.leave("b")
    limits.begin("b", 5)
    assert not limits.open
    assert not limits.waiting_tokens


def test_work_is_counted_while_it_is_held():
    limits = make_limits()
    with limits.held("a", 3, 30):
        assert (limits.open, limits.waiting_tokens) == ({"a": 3}, {"a": 30})
        assert "RateLimited" in refusal(limits, "a", 3, 0)
        with pytest.raises(RateLimited), limits.held("a", 3, 1):
            pytest.fail("it must not begin")
        assert (limits.open, limits.waiting_tokens) == ({"a": 3}, {"a": 30})
        with limits.held("b", 5, 0):
            assert limits.open == {"a": 3, "b": 5}
    with pytest.raises(ZeroDivisionError), limits.held("a", 1, 2):
        1 / 0  # noqa: B018
    assert not limits.open
    assert not limits.waiting_tokens


@pytest.mark.parametrize("account", ["", "a"])
def test_a_check_books_nothing(account):
    limits = make_limits()
    limits.check(account, 2, 10)
    assert "Overloaded" in refusal(limits, account, 11, 10)
    assert not limits.open.total()
    assert not limits.waiting_tokens.total()
    assert not limits.open.keys() | limits.waiting_tokens.keys(), "no account is kept for having asked"

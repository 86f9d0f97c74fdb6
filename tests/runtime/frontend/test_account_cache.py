"""What is kept of accounts: bounded for each and for all, for a time."""

import pytest

from runtime.frontend.account_cache import AccountCache


class Kept:
    """Texts whose size is their length: at most 1,000 of an account and 1,800 in all, for an hour."""

    def __init__(self):
        self.now = 0.0
        self.cache: AccountCache[str, str] = AccountCache(1800, 1000, 3600.0, len, lambda: self.now)

    def add(self, names: str, size: int, account: str = "alice") -> None:
        for name in names:
            self.cache.add(account, name, "x" * size)

    def names(self, account: str = "alice") -> str:
        return "".join(name for name, _ in self.cache.items(account))


def test_an_account_loses_its_own_least_recently_used_values():
    kept = Kept()
    kept.add("abc", 300)
    assert kept.cache.get("alice", "a") == "x" * 300
    kept.add("d", 350)
    assert kept.names() == "acd"
    kept.add("e", 1001)
    assert kept.names() == "acd", "one that is too large displaces nothing"
    kept.add("a", 1)
    assert kept.names("bob") == ""
    assert (kept.cache.get("alice", "a"), kept.cache.get("bob", "a"), kept.cache.get("alice", "e")) == ("x", None, None)


def test_the_largest_account_gives_way_when_all_are_full():
    kept = Kept()
    kept.add("ab", 500)
    kept.add("ab", 300, "bob")
    kept.add("c", 300, "carol")
    assert [kept.names(account) for account in ("alice", "bob", "carol")] == ["b", "ab", "c"]


def test_time_ends_a_value_also_of_accounts_that_come_no_more():
    kept = Kept()
    kept.add("a", 1)
    kept.now = 3599.0
    kept.add("b", 1)
    assert kept.names() == "ab"
    kept.now = 3600.0
    assert (kept.names(), kept.cache.get("alice", "a")) == ("b", None)


def test_values_are_removed_one_by_one_or_all():
    kept = Kept()
    kept.add("ab", 1)
    kept.cache.remove("alice", "a")
    with pytest.raises(KeyError):
        kept.cache.remove("alice", "a")
    assert kept.names() == "b"
    kept.cache.erase("alice")
    kept.cache.erase("nobody")
    assert kept.names() == ""

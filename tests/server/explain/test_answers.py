"""Earlier prompts: who finds them, for how long, and how many."""

from array import array

from radix import Namespace
from runtime.frontend.output import Encoded
from server.explain import answers
from server.explain.answers import Answers, Asked


class Store:
    def __init__(self):
        self.now = 0.0
        self.answers = Answers(lambda: self.now)

    def add(self, rid: str, tokens, account: str = "alice", salt: str = ""):
        space, key = Namespace(account, salt), array("i", tokens).tobytes()
        self.answers.add(Encoded([], rid=rid, account=account, namespace=space, tokens=key))

    def known(self, account: str = "alice") -> list[str]:
        return [str(i) for i in range(100) if self.answers.find(account, str(i))]


def test_an_answer_is_found_by_its_account_alone_with_any_routes_prefix():
    store = Store()
    store.add("ab12", [1, 2, 3], salt="s")
    expected = Asked(Namespace("alice", "s"), array("i", [1, 2, 3]).tobytes())
    for name in ("ab12", "chatcmpl-ab12", "cmpl-ab12", "resp_ab12", "msg_ab12"):
        assert store.answers.find("alice", name) == expected
    assert store.answers.find("bob", "ab12") is None
    assert store.answers.find("alice", "chatcmpl-resp_ab12") is None
    store.add("cmpl-own", [4])
    assert store.answers.find("alice", "cmpl-own").tokens == array("i", [4]).tobytes()
    store.add("ab12", [5])
    assert store.answers.find("alice", "ab12").tokens == array("i", [5]).tobytes(), "the latest of an id"


def test_short_answers_count_too(monkeypatch):
    monkeypatch.setattr(answers, "MOST_OF_ACCOUNT", 1000)
    store = Store()
    for i in range(30):
        store.add(str(i), [1])
    assert len(store.known()) == 1000 // 64
    store.now = answers.TTL_S
    assert store.known() == []

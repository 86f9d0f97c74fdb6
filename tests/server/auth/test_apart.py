"""All that is kept beside the tree is apart by tenant and by salt, as the tree's pages are."""

from array import array

import httpx
import pytest

from radix import Namespace
from runtime.features.drafts.lookup import RecentOutputs
from runtime.frontend.replay import EarlierAnswer, Replay

KEYS = {"alice": "alice-secret-key", "boss": "boss-secret-key"}
SPACES = [("alice", "a"), ("alice", "b"), ("alice", None), ("boss", "a")]
ALL = [Namespace(tenant, salt) for tenant in ("", "a", "b") for salt in ("", "a", "b")]


def ask(guarded, space: tuple[str, str | None], turns: list[dict], **fields) -> httpx.Response:
    tenant, salt = space
    key = {"Authorization": f"Bearer {KEYS[tenant]}"}
    words = httpx.post(f"{guarded.url}/tokenize", json={"prompt": " oak elm fir"}, headers=key).json()["tokens"]
    asked = {"messages": turns, "max_tokens": 20, "temperature": 0, "cache_salt": salt, "allowed_token_ids": words}
    return httpx.post(f"{guarded.url}/v1/chat/completions", json=asked | fields, headers=key)


@pytest.mark.parametrize("asker", SPACES)
def test_a_chat_s_next_turn_finds_nothing_of_another_s(guarded, asker):
    boss = {"Authorization": f"Bearer {KEYS['boss']}"}
    httpx.post(f"{guarded.url}/flush_cache?tiers=true", headers=boss).raise_for_status()
    first = [{"role": "user", "content": f"Name a tree, as {asker} would, and say why it is a tree."}]
    said = ask(guarded, asker, first).json()
    turns = [*first, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}]
    turns.append({"role": "user", "content": "Another one."})
    for other in [space for space in SPACES if space != asker]:
        answer = ask(guarded, other, turns, explain=True).json()
        read = answer["usage"]["prompt_tokens_details"]
        assert (read["cached_tokens"], read.get("replayed_tokens", 0)) == (0, 0)
        assert answer["explain"]["reason"] in ("never_here", "flushed")
        options = {"comparison_response_id": said["id"]}
        compared = ask(guarded, other, turns, prompt_cache_options=options)
        assert compared.status_code in (200, 404)
        assert "Name a tree" not in compared.text
    read = ask(guarded, asker, turns).json()["usage"]["prompt_tokens_details"]
    assert (read["cached_tokens"] > 0, read["replayed_tokens"] > 0) == (True, True)


def of_replay(tokenizer):
    replay, answer = Replay(tokenizer), array("i", tokenizer.encode("An oak.<|im_end|>", add_special_tokens=False))
    said = EarlierAnswer("Name a tree.", array("i", [1]), array("i", [12]), 0, answer)
    return lambda space: replay.add("one", space, said), lambda space: bool(
        replay.find("one", space, "Name a tree.An oak.<|im_end|>").sampled
    )


def of_drafts(tokenizer):
    recent = RecentOutputs()
    put = lambda space: recent.add(space, array("i", [1, 2, 3, 4]))  # noqa: E731
    return put, lambda space: bool(recent.find(space, array("i", [1, 2, 3]), 1)[0])


@pytest.mark.parametrize("kind", [of_replay, of_drafts])
def test_each_store_by_itself(tokenizer, kind):
    for owner in ALL:
        put, found = kind(tokenizer)
        put(owner)
        assert [space for space in ALL if found(space)] == [owner]

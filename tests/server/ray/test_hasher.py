"""Blocks of prompts as the routes make them, without an engine."""

import asyncio
import json
from array import array

import pytest

from radix import Namespace
from radix.hashes import block_hashes
from runtime.config import make_config
from runtime.protocol import ModelInfo
from server.auth.keys import Tenant, read_keys
from server.ray.hasher import PromptHasher

PAGE = 4


def blocks(ids: list[int], namespace: Namespace = Namespace()) -> list[int]:
    return list(block_hashes(array("i", ids).tobytes(), PAGE * 4, None, namespace))


@pytest.fixture(scope="module")
def ask(tiny_dir, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("boss boss-secret-key admin public\n")
    config = make_config(model=str(tiny_dir), page_size=PAGE)
    (boss,) = read_keys(keys)
    info = ModelInfo(
        name="tiny",
        path=str(tiny_dir),
        architecture="llama",
        vocab_size=49152,
        context_length=512,
        eos_token_ids=[2],
        dtype="float32",
        device="cpu",
        attention_backend="torch",
        page_size=PAGE,
        pool_tokens=4096,
    )
    hasher = PromptHasher(config, info)

    async def found(path: str, body: bytes, tenant: Tenant, method: str) -> list[int]:
        return array("Q", await hasher.hashes(method, path, body, tenant)).tolist()

    with asyncio.Runner() as runner:
        runner.run(hasher.start())

        def ask(path: str, body: object, tenant: Tenant = boss, method: str = "POST") -> list[int]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return runner.run(asyncio.wait_for(found(path, data, tenant, method), 60))

        ask.account = boss.account
        yield ask


IDS = list(range(50, 70))
MESSAGES = [{"role": "user", "content": "one two three four five six seven eight"}]


def test_blocks_are_those_of_the_tenants_own_tree(ask):
    own = Namespace(ask.account)
    assert ask("/generate", {"input_ids": IDS}) == blocks(IDS, own)
    assert ask("/generate", {"input_ids": IDS, "stream": True}) == blocks(IDS, own)
    salted = ask("/generate", {"input_ids": IDS, "cache_salt": "s"})
    assert salted == blocks(IDS, Namespace(ask.account, "s"))
    shared = ask("/v1/completions", {"prompt": IDS, "model": "tiny", "cache_scope": "public"})
    assert shared == blocks(IDS, Namespace("public"))


def test_chats_are_rendered_by_the_models_template(ask, tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES)
    expected = blocks(tokenizer.encode(text, False), Namespace(ask.account))
    assert len(expected) > 3
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    assert ask("/v1/chat/completions", body) == ask("/v1/messages", body) == expected
    assert ask("/v1/chat/completions", {**body, "stream": True}) == expected
    assert ask("/v1/responses", {"model": "tiny", "input": MESSAGES[0]["content"]}) == expected


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        ("/v1/completions", {"prompt": IDS, "model": "tiny", "cache_scope": "public"}, {"tenant": Tenant("", b"")}),
        ("/v1/responses", {"input": "x" * 200, "model": "tiny", "previous_response_id": "resp_1"}, {}),
        ("/v1/messages", {"messages": MESSAGES, "model": "tiny", "max_tokens": 1,
            "thread": {"type": "continue", "previous_message_id": "msg_1"}}, {}),
        ("/generate", {"input_ids": [10**6]}, {}),
        ("/generate", b"{", {}),
        ("/v1/chat/completions", {"model": "another", "messages": []}, {}),
        ("/v1/models", b"", {"method": "GET"}),
        ("/flush_cache", b"", {}),
        ("/generate", {"input_ids": IDS, "sampling_param": {}}, {}),
    ],
)  # fmt: skip
def test_requests_that_are_refused_and_other_routes_have_none(ask, path, body, more):
    assert ask(path, body, **more) == []

"""Blocks of prompts as the routes make them, without an engine."""

import asyncio
import json
from array import array

import pytest

from radix import Namespace
from radix.hashes import block_hashes
from runtime.config import make_config
from runtime.protocol import ModelInfo
from server.auth.keys import read_keys
from server.ray.hasher import PromptHasher

PAGE = 4


def blocks(ids: list[int], namespace: Namespace = Namespace()) -> list[int]:
    return list(block_hashes(array("i", ids).tobytes(), PAGE * 4, None, namespace))


@pytest.fixture(scope="module")
def ask(tiny_dir, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("boss boss-secret-key admin public\n")
    config = make_config(model=str(tiny_dir), page_size=PAGE, api_keys=keys)
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

    async def found(path: str, body: bytes, key: str, method: str) -> list[int]:
        headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key.encode())]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": headers,
            "query_string": b"",
            "scheme": "http",
        }
        return array(
            "Q", await hasher.hashes({**scope, "http_version": "1.1", "raw_path": path.encode()}, body)
        ).tolist()

    with asyncio.Runner() as runner:
        runner.run(hasher.start())

        def ask(path: str, body: object, key: str = "boss-secret-key", method: str = "POST") -> list[int]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return runner.run(asyncio.wait_for(found(path, data, key, method), 60))

        ask.account = read_keys(keys)[0].account
        yield ask


IDS = list(range(50, 70))


def test_blocks_are_those_of_the_tenants_own_tree(ask):
    own = Namespace(ask.account)
    assert ask("/generate", {"input_ids": IDS}) == blocks(IDS, own)
    assert ask("/generate", {"input_ids": IDS, "stream": True}) == blocks(IDS, own)
    salted = ask("/generate", {"input_ids": IDS, "cache_salt": "s"})
    assert salted == blocks(IDS, Namespace(ask.account, "s"))
    shared = ask("/v1/completions", {"prompt": IDS, "model": "tiny", "cache_scope": "public"})
    assert shared == blocks(IDS, Namespace("public"))


def test_chats_are_rendered_by_the_models_template(ask, tokenizer):
    messages = [{"role": "user", "content": "one two three four five six seven eight"}]
    text = tokenizer.apply_chat_template(messages)
    expected = blocks(tokenizer.encode(text, False), Namespace(ask.account))
    assert len(expected) > 3
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    assert ask("/v1/chat/completions", body) == ask("/v1/messages", body) == expected
    assert ask("/v1/chat/completions", {**body, "stream": True}) == expected


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        ("/generate", {"input_ids": IDS}, {"key": "no-such-key"}),
        ("/generate", {"input_ids": [10**6]}, {}),
        ("/generate", b"{", {}),
        ("/v1/chat/completions", {"model": "another", "messages": []}, {}),
        ("/v1/models", b"", {"method": "GET"}),
        ("/flush_cache", b"", {}),
        ("/generate", {"input_ids": IDS, "sampling_param": {}}, {}),
    ],
)
def test_requests_that_are_refused_and_other_routes_have_none(ask, path, body, more):
    assert ask(path, body, **more) == []

"""OpenAI's contract of prompt caches, through its client: what is kept, and what the usage says of it."""

import openai
import pytest

from runtime.frontend.output import Output
from server.openai.common import usage

MODEL = "smollm2"
PAGE = 16


def test_usage_counts_what_the_first_choice_read():
    """The others read the prompt that the first one has computed."""
    outputs = [Output(0, choice, "r", prompt_tokens=20, cached_tokens=cached) for choice, cached in ((0, 0), (1, 16))]
    told = usage(outputs)
    assert (told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]) == (20, 0)


def words(seed: int, count: int) -> str:
    return " ".join(f"{word} {seed}" for word in ["oak", "elm", "ash", "fir", "yew"] * (count // 10))


def kept_tokens(client) -> int:
    return client.get("/cache/stats").json()["pages_held"] * PAGE


@pytest.fixture(autouse=True)
def nothing_stays(client):
    assert client.post("/flush_cache").status_code == 200
    yield
    assert client.post("/flush_cache?pins=true").status_code == 200
    assert kept_tokens(client) == 0


def chat(api: openai.OpenAI, parts: list, **options):
    options = {"model": MODEL, "max_tokens": 1, "temperature": 0, **options}
    usage = api.chat.completions.create(messages=[{"role": "user", "content": parts}], **options).usage
    details = usage.prompt_tokens_details
    split = details.cache_write_tokens_details
    assert details.cache_write_tokens == sum(split.values() if isinstance(split, dict) else dict(split).values())
    assert details.cached_tokens + details.cache_write_tokens <= usage.prompt_tokens
    return usage


def part(text: str, ttl: str | None = None) -> dict:
    point = {"mode": "explicit"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": text, "prompt_cache_breakpoint": point}


def test_breakpoints_are_kept_for_their_time(api, client):
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    parts = [part(words(1, 80), "12h"), part(words(2, 60)), {"type": "text", "text": words(3, 40)}]
    first = chat(api, parts, extra_body=explicit)
    written = first.prompt_tokens_details
    assert 0 < written.cache_write_tokens < first.prompt_tokens
    split = dict(written.cache_write_tokens_details)
    assert all(tokens > 0 for tokens in split.values()), "the first text for 12 hours, the second for 30 minutes"
    assert kept_tokens(client) == written.cache_write_tokens
    again = chat(api, parts, extra_body=explicit).prompt_tokens_details
    assert again.cache_write_tokens == 0
    assert again.cached_tokens >= written.cache_write_tokens
    assert client.post("/flush_cache").json()["live_tokens"] == written.cache_write_tokens
    assert chat(api, parts, extra_body=explicit).prompt_tokens_details.cached_tokens == written.cache_write_tokens


def test_a_comparison_alone_keeps_nothing(api, client):
    first = api.chat.completions.create(messages=[{"role": "user", "content": words(6, 80)}], model=MODEL, max_tokens=1)
    options = {"prompt_cache_options": {"comparison_response_id": first.id}}
    usage = chat(api, [{"type": "text", "text": words(6, 80) + " x"}], extra_body=options)
    assert usage.prompt_tokens_details.cached_tokens > 0
    assert usage.prompt_tokens_details.cache_write_tokens == kept_tokens(client) == 0


def test_without_a_word_nothing_is_kept(api, client):
    usage = chat(api, [{"type": "text", "text": words(4, 80)}], extra_body={"prompt_cache_key": "a"})
    assert usage.prompt_tokens_details.cache_write_tokens == kept_tokens(client) == 0


@pytest.mark.parametrize("asked", [{"prompt_cache_options": {"ttl": "12h"}}, {"prompt_cache_retention": "24h"}])
def test_the_implicit_breakpoint_is_the_whole_prompt(api, client, asked):
    usage = chat(api, [{"type": "text", "text": words(5, 80)}], extra_body=asked)
    assert usage.prompt_tokens_details.cache_write_tokens == kept_tokens(client) == usage.prompt_tokens // PAGE * PAGE


def test_the_latest_breakpoints_count(api, client):
    """Of five, the first is left out, and the last is near the end of the prompt."""
    parts = [part(words(seed, 30)) for seed in range(6, 11)]
    usage = chat(api, parts, extra_body={"prompt_cache_options": {"mode": "explicit"}})
    assert usage.prompt_tokens_details.cache_write_tokens == kept_tokens(client) > usage.prompt_tokens - 24


def test_a_prompt_is_warmed_without_an_answer(api, client):
    options = {"prompt_cache_options": {"prewarm": True}}
    asked = {"model": MODEL, "input": words(11, 80), "temperature": 0}
    warm = api.responses.create(**asked, extra_body=options, store=False)
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    assert (warm.prompt_cache_options.mode, warm.prompt_cache_options.ttl) == ("implicit", "30m")
    written = warm.usage.input_tokens_details.cache_write_tokens
    assert written == warm.usage.input_tokens // PAGE * PAGE
    after = api.responses.create(**asked, max_output_tokens=2, store=False)
    assert after.usage.input_tokens_details.cached_tokens >= written - PAGE

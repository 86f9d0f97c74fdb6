"""A block diffusion model over a live server: streams by block, turns, stops, seeds, and what is refused."""

import httpx
import openai
import pytest

from tests.runtime.features.diffusion.bicache.models import save_tiny
from tests.server.conftest import start, stop
from tests.server.sglang.test_generate import ask, events_until

PROMPT = "A prompt that is long enough to fill some pages, about roots, stems and leaves of aspens, and their names."
# No multiple of the model's blocks of 8.
LENGTH = 21
GREEDY = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
JOINT = {"algorithm": "joint_threshold", "threshold": 0.9, "edit_threshold": 0.0, "max_post_edit_steps": 2}


@pytest.fixture(scope="module")
def served(default_model_dir, tmp_path_factory):
    """A server of a small random LLaDA2; its pages are checked at the end."""
    directory = tmp_path_factory.mktemp("blocks")
    path = save_tiny("llada2", directory / "tiny-llada2", tokenizer_from=default_model_dir)
    server = start(directory / "log", "--model", str(path), "--pool-tokens", "4096", "--debug-invariants")
    yield server
    server.check_idle()
    assert stop(server) == 0
    assert "Traceback" not in (directory / "log").read_text()


@pytest.fixture
def blocks(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
    served.check_idle()


def test_a_stream_comes_by_blocks_where_tokens_may_be_edited(blocks):
    ids = blocks.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    whole = ask(blocks, input_ids=ids, sampling_params=GREEDY, diffusion=JOINT)

    def ends(parts: list[dict]) -> set[int]:
        """Where events but the last one end within a block."""
        return {(len(ids) + len(part["output_ids"])) % 8 for part in parts[:-1] if part["output_ids"]}

    parts = events_until(ends, blocks, input_ids=ids, sampling_params=GREEDY, diffusion=JOINT)
    assert "".join(part["delta"] for part in parts) == parts[-1]["text"] == whole["text"]
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert len(whole["output_ids"]) == LENGTH
    assert ends(parts) == {0}
    # Without edits, every token is shown once those before it are there.
    options = {"input_ids": ids, "sampling_params": GREEDY, "diffusion": {"threshold": 1.0}}
    assert events_until(lambda parts: ends(parts) - {0}, blocks, **options)


def test_the_next_turn_of_a_chat_finds_the_last_one(blocks, served):
    blocks.post("/flush_cache")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
        settings = {"model": "tiny-llada2", "temperature": 0, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}}
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "Why?"}]
        first = api.chat.completions.create(messages=messages, **settings)
        assert first.usage.completion_tokens == LENGTH
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "When?"}]
        second = api.chat.completions.create(messages=messages, **settings)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert first.usage.prompt_tokens - 16 < cached < second.usage.prompt_tokens
        parts = list(api.chat.completions.create(messages=messages, stream=True, **settings))
        deltas = [part.choices[0].delta.content or "" for part in parts if part.choices]
        assert "".join(deltas) == second.choices[0].message.content
        blocks.post("/flush_cache")
        assert api.chat.completions.create(messages=messages, **settings).choices == second.choices


def test_stop_strings_and_the_length_end_it_within_a_block(blocks):
    whole = ask(blocks, text=PROMPT, sampling_params=GREEDY)["text"]
    word = whole[12:17]
    for diffusion in ({}, {"stream_canvas": True}):
        ended = ask(blocks, text=PROMPT, sampling_params={**GREEDY, "stop": [word]}, diffusion=diffusion)
        assert ended["text"] == whole[: whole.index(word)]
        assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    for length in (1, 8, 9):
        short = ask(blocks, text=PROMPT, sampling_params={**GREEDY, "max_new_tokens": length})
        assert short["meta_info"]["completion_tokens"] == length
        assert short["meta_info"]["finish_reason"] == {"type": "length", "length": length}

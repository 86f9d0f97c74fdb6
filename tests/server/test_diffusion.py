"""Diffusion models over a live server: /generate, the openai client, pins, and what is refused."""

import re

import httpx
import openai
import pytest

from tests.runtime.features.diffusion.gemma import CANVAS, save_gemma
from tests.server.conftest import start, stop
from tests.server.sglang.test_generate import ask, events, events_until

GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
PROMPT = "A prompt that is long enough to fill some pages, about roots, stems and leaves of aspens, and their names."
MASK = 3


@pytest.fixture
def tiny(denoiser):
    with httpx.Client(base_url=denoiser.url, timeout=60) as client:
        yield client
    denoiser.check_idle()


def test_generate_and_what_it_says_of_reuse(tiny):
    tiny.post("/flush_cache")
    settings = {"steps": 8, "block_length": 8, "prefix_tokens": 16, "depth": 2, "refresh_interval": 3}
    cold = ask(tiny, text=PROMPT, sampling_params=GREEDY, diffusion=settings)
    warm = ask(tiny, text=PROMPT, sampling_params=GREEDY, diffusion=settings)
    assert cold["output_ids"] == warm["output_ids"]
    assert len(cold["output_ids"]) == 16
    assert MASK not in cold["output_ids"]
    for answer, cached in ((cold, 0), (warm, 16)):
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 16}
        assert (meta["cached_tokens"], meta["shallow_depth"], meta["refreshes"]) == (cached, 2, 3)
        assert meta["denoise_steps"] == 8
        assert meta["prefix_ratio"] == pytest.approx(16 / (meta["prompt_tokens"] + 16), abs=1e-4)
    plain = ask(tiny, text=PROMPT, sampling_params=GREEDY, diffusion={**settings, "reuse": False})
    assert plain["meta_info"]["shallow_depth"] == plain["meta_info"]["cached_tokens"] == 0


def first_tokens(tiny):
    """Recorded times to first token."""
    text = tiny.get("/metrics").text
    return float(re.search(r"^sglang:time_to_first_token_seconds_count\{.*\} (\S+)$", text, re.MULTILINE)[1])


def test_a_stream_shows_what_is_settled_and_the_canvas(tiny):
    settings = {"steps": 8, "block_length": 16, "stream_canvas": True}
    before, tries = first_tokens(tiny), []

    def shows_a_mask(parts: list[dict]) -> bool:
        tries.append(parts)
        return MASK in parts[0]["canvas"]

    whole = ask(tiny, text=PROMPT, sampling_params=GREEDY, diffusion=settings)
    parts = events_until(shows_a_mask, tiny, text=PROMPT, sampling_params=GREEDY, diffusion=settings)
    assert "".join(part["delta"] for part in parts) == parts[-1]["text"] == whole["text"]
    assert parts[-1]["output_ids"] == parts[-1]["canvas"] == whole["output_ids"]
    assert len({len(part["canvas"]) for part in parts}) == 1
    after = first_tokens(tiny)
    assert after == before + 1 + len(tries), "the time to the first token, not to the first canvas"
    for part in parts:
        assert part["canvas"][: len(part["output_ids"])] == part["output_ids"]


def test_chat_shares_its_system_message(tiny, denoiser):
    tiny.post("/flush_cache")
    with openai.OpenAI(base_url=f"{denoiser.url}/v1", api_key="none", max_retries=0) as api:

        def chat(question, **options):
            messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
            asked = {"model": "tiny-llada", "messages": messages, "temperature": 0, "max_tokens": 8}
            return api.chat.completions.create(**asked, **options)

        first, second = chat("Why?"), chat("When?")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert 16 <= cached < second.usage.prompt_tokens
        assert cached % 16 == 0
        off = chat("When?", extra_body={"diffusion": {"reuse": False}})
        assert off.usage.prompt_tokens_details.cached_tokens == 0
        streamed = "".join(part.choices[0].delta.content or "" for part in chat("When?", stream=True))
        assert streamed == second.choices[0].message.content


def test_stop_strings_end_it(tiny):
    whole = ask(tiny, text=PROMPT, sampling_params=GREEDY)["text"]
    stop = whole[10:14]
    ended = ask(tiny, text=PROMPT, sampling_params={**GREEDY, "stop": [stop]})
    assert ended["text"] == whole[: whole.index(stop)]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_pin_encodes_the_prefix(tiny):
    tiny.post("/flush_cache?pins=true")
    ids = tiny.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"][:16]
    pin = tiny.post("/cache/pin", json={"input_ids": ids}).json()
    assert pin["tokens"] == 16
    tiny.post("/flush_cache")
    answer = ask(tiny, text=PROMPT, sampling_params=GREEDY, diffusion={"prefix_tokens": 16})
    assert answer["meta_info"]["cached_tokens"] == 16
    assert answer["meta_info"]["encoded_tokens"] == 16
    assert answer["meta_info"]["shallow_depth"] == 1, "there is no table"
    assert tiny.delete(f"/cache/pins/{pin['id']}").status_code == 200
    tiny.post("/flush_cache")
    assert ask(tiny, text=PROMPT, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0


def test_an_answer_explains_a_miss(tiny):
    tiny.post("/flush_cache?pins=true")
    reasons = {"prefix_tokens": 16}, {"prefix_tokens": 16}, {"prefix_tokens": 3}, {"reuse": False}
    found = [
        ask(tiny, text=PROMPT, sampling_params=GREEDY, diffusion=fields, explain=True)["meta_info"]["explain"]
        for fields in reasons
    ]
    assert [each["reason"] for each in found] == ["entries_missing", "hit", "too_short", "not_stored"]
    tiny.post("/flush_cache")
    unknown = ask(tiny, text=PROMPT, sampling_params=GREEDY, explain=True)["meta_info"]["explain"]
    assert (unknown["reason"], unknown["cached_tokens"]) == ("never_here", 0)


def test_server_info_and_health(tiny):
    info = tiny.get("/server_info").json()
    assert info["model_info"]["diffusion"]["mask_token_id"] == MASK
    assert info["model_info"]["diffusion"]["depth_table"].startswith("none: depth 1")
    assert info["model_info"]["diffusion"]["refresh_interval"] == 1, "exact"
    assert info["state"]["denoise_steps"] >= info["state"]["refreshes"]
    assert tiny.get("/health_generate").status_code == 200
    assert "ramet:steps_total" in tiny.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"diffusion": {"block_length": 5}}, "diffusion.block_length"),
        ({"diffusion": {"gen_length": 8, "steps": 3, "block_length": 4}}, "diffusion.steps"),
        ({"diffusion": {"depth": 5}}, "diffusion.depth"),
        ({"diffusion": {"prefix_tokens": 500}}, "diffusion.prefix_tokens"),
        ({"diffusion": {"algorithm": "best"}}, "diffusion.algorithm"),
        ({"diffusion": {"algorithm": "joint_threshold"}}, "diffusion.algorithm"),
        ({"diffusion": {"algorithm": "entropy_bound"}}, "diffusion.algorithm"),
        ({"diffusion": {"confidence_threshold": 0.5}}, "diffusion.confidence_threshold"),
        ({"diffusion": {"eps": 0}}, "diffusion.eps"),
        ({"diffusion": {"what": 1}}, "diffusion.what"),
        ({"diffusion": {"gen_length": 600}}, "sampling_params.max_new_tokens"),
        ({"return_logprob": True}, "logprobs"),
        ({"reuse": {"method": "reasoncache"}}, "reuse"),
        ({"sampling_params": {**GREEDY, "min_p": 0.5}}, "sampling_params.min_p"),
    ],
)
def test_what_is_refused(tiny, body, param):
    check_refused(tiny, body, param)


def check_refused(client: httpx.Client, body: dict, param: str) -> None:
    answer = client.post("/generate", json={"input_ids": [5], "sampling_params": GREEDY, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_causal_model_does_not_denoise(client):
    check_refused(client, {"diffusion": {"steps": 4}}, "diffusion")


@pytest.fixture(scope="module")
def noisy(default_model_dir, tmp_path_factory):
    """A client of a server of a small random DiffusionGemma; its pages are checked at the end."""
    directory = tmp_path_factory.mktemp("noisy")
    path = save_gemma(directory / "tiny-gemma", {"max_denoising_steps": 4}, default_model_dir)
    server = start(directory / "log", "--model", str(path), "--pool-tokens", "1024", "--debug-invariants")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.check_idle()
    assert stop(server) == 0
    assert "Traceback" not in (directory / "log").read_text()


def test_noise_streams_by_canvas(noisy):
    sampling = {"max_new_tokens": 2 * CANVAS + 2, "seed": 3, "ignore_eos": True}
    whole = ask(noisy, text=PROMPT, sampling_params=sampling)
    parts = events(noisy, text=PROMPT, sampling_params=sampling, diffusion={"stream_canvas": True})
    assert "".join(part["delta"] for part in parts) == parts[-1]["text"] == whole["text"]
    assert parts[-1]["output_ids"] == parts[-1]["canvas"] == whole["output_ids"]
    shown = [len(part["output_ids"]) for part in parts]  # a reader that is behind gets several steps as one
    assert shown == sorted(shown)
    assert {*shown} <= {0, CANVAS, 2 * CANVAS, 2 * CANVAS + 2}
    assert (len(shown) <= 12, shown[-1]) == (True, 2 * CANVAS + 2)
    meta = parts[-1]["meta_info"]
    assert (meta["denoise_steps"], meta["completion_tokens"]) == (12, 2 * CANVAS + 2)
    assert meta["cached_tokens"] == meta["prompt_tokens"]
    info = noisy.get("/server_info").json()["model_info"]
    assert (info["model_impl"], info["diffusion"]["defaults"]["steps"]) == ("transformers", 4)


def test_noise_in_a_chat_and_in_choices(noisy):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "seed": 1, "n": 2}
    first, again = (noisy.post("/v1/chat/completions", json=body).json() for _ in range(2))
    assert first["choices"] == again["choices"]
    assert first["choices"][0]["message"] != first["choices"][1]["message"]
    streamed = noisy.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")

"""llama.cpp's `/infill`, with a tiny model whose tokenizer has the tokens for it."""

import json
import shutil
from types import SimpleNamespace

import httpx
import pytest

from runtime.errors import InvalidRequest
from server.openai.infill import Extra, infill_prompt
from tests.server.conftest import start, stop

NAMES = {"<reponame>": "<fim_prefix>", "<file_sep>": "<fim_suffix>", "<filename>": "<fim_middle>"}


@pytest.fixture(scope="module")
def url(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("infill") / "model"
    shutil.copytree(tiny_dir, directory)
    path = directory / "tokenizer.json"
    text = path.read_text()
    for old, new in NAMES.items():
        assert json.dumps(old) in text
        text = text.replace(json.dumps(old), json.dumps(new))
    path.write_text(text)
    server = start(directory.with_name("log"), "--model", str(directory), "--context-length", "128")
    yield server.url
    assert stop(server) == 0


def tokenizer(*tokens):
    return SimpleNamespace(token_to_id=lambda token: 1 if token in tokens else None)


def test_prompts_of_families():
    qwen = tokenizer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    whole = "<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>"
    start = "<|repo_name|>myproject\n<|file_sep|>x.py\nb<|file_sep|>filename\n"
    assert infill_prompt(qwen, "a", "c", [Extra(text="b", filename="x.py")]) == start + whole
    plain = tokenizer("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert infill_prompt(plain, "a", "c", [Extra(text="b")]) == (
        "\n\n--- snippet ---\n\nb<fim_prefix>a<fim_suffix>c<fim_middle>"
    )
    with pytest.raises(InvalidRequest, match="no tokens for a prefix and a suffix"):
        infill_prompt(tokenizer("<fim_prefix>"), "a", "c")


def test_an_answer_and_its_stream(url):
    asked = {"input_prefix": "def f", "input_suffix": "return", "prompt": "(a)", "n_predict": 6, "temperature": 0}
    whole = httpx.post(f"{url}/infill", json={**asked, "samplers": ["infill"], "ignore_eos": True}).json()
    prompt = "<repo_name>myproject\n<fim_prefix>def f(a)<fim_suffix>return<fim_middle>"
    completion = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    choice = httpx.post(f"{url}/v1/completions", json=completion).json()["choices"][0]
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == (choice["text"], 6, "limit")
    suffixed = {**completion, "prompt": "def f(a)", "suffix": "return"}
    assert httpx.post(f"{url}/v1/completions", json=suffixed).json()["choices"][0]["text"] == choice["text"]
    lines = httpx.post(f"{url}/infill", json={**asked, "stream": True, "ignore_eos": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == choice["text"]
    assert [event["stop"] for event in events] == [*[False] * (len(events) - 1), True]
    fields = ["content", "timings/prompt_n", "none/such"]
    few = httpx.post(f"{url}/infill", json={**asked, "response_fields": fields}).json()
    assert few.keys() == {"content", "timings/prompt_n"}


def test_a_prompt_that_is_too_long_is_refused_in_llama_cpps_words(url):
    answer = httpx.post(f"{url}/infill", json={"input_prefix": "tree " * 200, "input_suffix": ""})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
    assert error["n_ctx"] == 128
    assert f"request ({error['n_prompt_tokens']} tokens) exceeds the available context size" in error["message"]


def test_what_is_refused(url, client):
    for body, param in (
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_prefix": "a", "input_suffix": "b", "n_probs": 3}, "n_probs"),
        ({"input_prefix": "a", "input_suffix": "b", "response_fields": ["/" * 257]}, "response_fields.0"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, "input_extra.0.text"),
    ):
        answer = httpx.post(f"{url}/infill", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for body in ({"suffix": "x", "prompt": [1, 2]}, {"suffix": "x", "prompt": "a", "echo": True}):
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    answer = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_suffix_for_many_prompts_is_bounded(url):
    asked = {"prompt": ["a"] * 1000, "suffix": "b" * 10_000, "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")

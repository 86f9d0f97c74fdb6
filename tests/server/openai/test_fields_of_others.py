"""Fields and routes of vLLM, SGLang and llama.cpp, over a live server."""

import re

import openai
import pytest

from tests.server.openai.test_openai import CHAT, MODEL

PROMPT = "The capital of France is"
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"guided_choice": ["oak", "elm tree"]}, "oak|elm tree"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"ebnf": 'root ::= ("a" | "b") "!" "!"'}, "[ab]!!"),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [1, 22]}}}, "1|22"),
        ({"response_format": {"type": "json_object", "schema": {"enum": [1, 22]}}}, "1|22"),
    ],
)
def test_formats_of_answers(client, fields, shape):
    for path, asked in (("chat/completions", {"messages": CHAT}), ("completions", {"prompt": PROMPT})):
        body = {"model": MODEL, "max_tokens": 20, "seed": 1, **asked, **fields}
        (choice,) = client.post(f"/v1/{path}", json=body).json()["choices"]
        assert re.fullmatch(shape, choice.get("text") or choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


def test_a_grammar_that_is_none_is_refused(client):
    answer = client.post("/generate", json={"text": "x", "sampling_params": {"ebnf": "no grammar"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "sampling_params.grammar")
    assert "neither EBNF nor Lark" in error["message"]


def test_tokens_of_prompt_and_answer(api, client):
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    asked = {**GREEDY, "prompt": PROMPT, "max_tokens": 3}
    options = {"return_token_ids": True, "request_id": "mine"}
    whole = api.completions.create(**asked, extra_body=options)
    (choice,) = whole.choices
    assert (whole.id, choice.prompt_token_ids) == ("cmpl-mine", ids)
    assert client.post("/detokenize", json={"tokens": choice.token_ids}).json()["prompt"] == choice.text
    chunks = list(api.completions.create(**asked, stream=True, extra_body=options))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
    assert chunks[0].choices[0].prompt_token_ids == ids
    chat = api.chat.completions.create(**GREEDY, messages=CHAT, max_tokens=2, extra_body=options)
    rendered = client.post("/tokenize", json={"messages": CHAT, "return_token_strs": True}).json()
    assert chat.prompt_token_ids == rendered["tokens"]
    assert len(rendered["token_strs"]) == rendered["count"] == chat.usage.prompt_tokens
    chunks = list(api.chat.completions.create(**GREEDY, messages=CHAT, max_tokens=2, stream=True, extra_body=options))
    assert [t for chunk in chunks for t in getattr(chunk.choices[0], "token_ids", [])] == chat.choices[0].token_ids


def test_a_prompt_is_truncated_at_its_beginning(client):
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    for count, wanted in ((2, ids[-2:]), (100, ids), (-1, ids)):
        body = {**GREEDY, "prompt": PROMPT, "max_tokens": 1, "truncate_prompt_tokens": count, "return_token_ids": True}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["prompt_token_ids"] == wanted


def test_the_last_message_is_continued(api):
    turns = [*CHAT, {"role": "assistant", "content": "The best word is "}]
    body = {"continue_final_message": True, "return_token_ids": True}
    answer = api.chat.completions.create(**GREEDY, messages=turns, max_tokens=4, extra_body=body)
    asked = api.chat.completions.create(**GREEDY, messages=CHAT, max_tokens=1, extra_body={"return_token_ids": True})
    start = len(asked.prompt_token_ids)
    assert answer.prompt_token_ids[:start] == asked.prompt_token_ids
    assert answer.usage.prompt_tokens > start
    with pytest.raises(openai.BadRequestError):
        api.chat.completions.create(**GREEDY, messages=turns, extra_body={**body, "add_generation_prompt": True})


def test_no_tokens_and_all_that_fit(api):
    none = api.chat.completions.create(**GREEDY, messages=CHAT, max_tokens=0)
    assert (none.choices[0].message.content, none.choices[0].finish_reason) == ("", "length")
    until_its_end = api.chat.completions.create(**GREEDY, messages=CHAT, stop=["."])
    assert until_its_end.choices[0].finish_reason == "stop"
    all_that_fit = api.completions.create(**GREEDY, prompt="1, 2,", max_tokens=-1, stop=[" 9"])
    assert all_that_fit.usage.completion_tokens > 16


def test_names_of_the_model(client, server, default_model_dir):
    for name in (MODEL, str(default_model_dir), default_model_dir.name, "", None):
        assert client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1}).status_code == 200
    assert client.get(f"/v1/models/{default_model_dir.name}").json()["root"] == MODEL
    info = client.get("/server_info").json()
    assert (info["served_model_name"], info["tokenizer_path"]) == (MODEL, str(default_model_dir))


def test_routes_of_others(client):
    assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 501
    info = client.get("/tokenizer_info").json()
    assert (info["eos_token"], "messages" in info["chat_template"]) == ("<|im_end|>", True)
    load = client.get("/v1/loads").json()
    assert load["aggregate"]["total_reqs"] == load["loads"][0]["num_running_reqs"] == 0
    for path in ("/version", "/v1/models", "/server_info", "/metrics", "/health"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert client.head("/generate").status_code == 405

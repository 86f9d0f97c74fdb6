"""The OpenAI routes through the real `openai` client, over a live server."""

import openai
import pytest

MODEL = "smollm2"
CHAT = [{"role": "user", "content": "Say hello."}]


def test_models(api):
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).object == "model"


def test_a_chat_and_its_stream_have_a_usage_and_one_end(api):
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0}
    whole = api.chat.completions.create(**asked, max_tokens=12)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = api.chat.completions.create(**asked, max_completion_tokens=12, **with_usage)
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in parts) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in parts if c.choices[0].finish_reason] == [whole.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_a_conversation_reuses_its_earlier_turns(api):
    system = {"role": "system", "content": "You answer questions about trees that share one root. " * 8}
    first = api.chat.completions.create(model=MODEL, messages=[system, *CHAT], temperature=0, max_tokens=20)
    turns = [system, *CHAT, {"role": "assistant", "content": first.choices[0].message.content}]
    second = api.chat.completions.create(
        model=MODEL, messages=[*turns, {"role": "user", "content": "And then?"}], temperature=0, max_tokens=4
    )
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_content_parts_n_seed_logprobs(api):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Name a tree."}]}]
    options = {"model": MODEL, "messages": messages, "n": 2, "seed": 7, "max_tokens": 6}
    one = api.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    two = api.chat.completions.create(**options)
    assert [c.message.content for c in one.choices] == [c.message.content for c in two.choices]
    entries = one.choices[0].logprobs.content
    assert len(entries[0].top_logprobs) == 2
    assert entries[0].logprob <= 0


def test_completions(api):
    options = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    answer = api.completions.create(
        **options, prompt=["The capital of France is", "Once upon a time"], logprobs=1, echo=True
    )
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert len(answer.choices[0].logprobs.tokens) == 5 + 6
    assert answer.choices[1].index == 1
    stream = api.completions.create(**options, prompt="The capital of France is", stream=True)
    streamed = "".join(c.choices[0].text for c in stream)
    ids = api.completions.create(**options, prompt=[504, 3575, 282, 4649, 314])
    assert ids.choices[0].text == streamed == answer.choices[0].text.removeprefix("The capital of France is")


def test_seed_stop_bias_and_the_names_of_limits(api):
    options = {"model": MODEL, "messages": CHAT, "seed": 3, "temperature": 1.2}
    first = api.chat.completions.create(**options, max_completion_tokens=10)
    second = api.chat.completions.create(**options, max_tokens=10)
    none = api.chat.completions.create(**options, max_tokens=10, max_completion_tokens=0)
    assert (none.choices[0].message.content, none.usage.completion_tokens) == ("", 0)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.system_fingerprint == second.system_fingerprint
    assert first.system_fingerprint.startswith("ramet-")
    greedy = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 12}
    assert api.completions.create(**greedy, stop=[" 6"]).choices[0].text == " 5,"
    answer = api.completions.create(**greedy, logit_bias={"216": -100}, logprobs=0,
                                    extra_body={"top_k": 1, "min_p": 0.1, "ignore_eos": True})  # fmt: skip
    assert " " not in answer.choices[0].logprobs.tokens


def test_an_answer_has_its_least_number_of_tokens(client):
    body = {"prompt": "One, two,", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    ids = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    asked = [body | {"stop_token_ids": ids[:1], "min_tokens": least} for least in (0, 6)]
    asked.append(asked[0] | {"no_stop_trim": True})
    answers = [client.post("/v1/completions", json=one).json() for one in asked]
    short, long, _ = (answer["usage"]["completion_tokens"] for answer in answers)
    assert short == 1 < 6 <= long
    trimmed, _, kept = (answer["choices"][0]["text"] for answer in answers)
    assert trimmed == "" != kept  # as before a stop string, the text ends before a stop token


@pytest.mark.parametrize("prompt", ["😀 ab cd", "ab<|im_end|>é😀 x"])
def test_places_of_tokens_in_the_text(api, prompt):
    asked = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 0, "temperature": 0, "max_tokens": 6}
    whole = api.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in api.completions.create(**asked, stream=True)]
    for text, tokens, places in (
        (whole.text, whole.logprobs.tokens, whole.logprobs.text_offset),
        (
            "".join(one.text for one in chunks),
            *([x for one in chunks for x in getattr(one.logprobs, name)] for name in ("tokens", "text_offset")),
        ),
    ):
        for token, place in zip(tokens, places, strict=True):
            assert "\ufffd" in token or text[place:].startswith(token), (token, place)
        assert any("\ufffd" in token for token in tokens)


def test_log_probabilities_of_a_prompt_in_vllms_form(client):
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    echoed = client.post("/v1/completions", json={**body, "echo": True, "logprobs": 2}).json()["choices"][0]["logprobs"]
    for logprobs in (None, 1):
        whole = client.post("/v1/completions", json={**body, "prompt_logprobs": 2, "logprobs": logprobs}).json()
        first, *others = whole["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [next(iter(one.values()))["decoded_token"] for one in others] == echoed["tokens"][1:5]
        values = [next(iter(one.values()))["logprob"] for one in others]
        assert values == pytest.approx(echoed["token_logprobs"][1:5], abs=1e-4)
        for one in others:
            ranked = {entry["rank"]: entry["logprob"] for entry in one.values()}
            assert len(one) in (2, 3)
            assert ranked[1] == max(ranked.values())
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    whole = client.post("/v1/chat/completions", json=chat).json()
    named = [next(iter(one)) for one in whole["prompt_logprobs"][1:]]
    assert named == [str(token) for token in whole["prompt_token_ids"][1:]]
    answer = client.post("/v1/chat/completions", json={**chat, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_prompt_is_scored_without_an_answer(api):
    answer = api.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("The capital of France is", "length")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 20}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": 7}]}]}, None),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
)
def test_what_is_not_supported_is_refused(api, options, param):
    options = {"model": MODEL, "messages": CHAT} | options
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(**options)
    if param:
        assert error.value.body["param"] == param
    assert error.value.body["message"]


def test_nulls_mean_the_default(client):
    """LangChain and LiteLLM send what was not set as null."""
    unset = ("n", "stop", "seed", "top_p", "logprobs", "logit_bias", "presence_penalty", "stream_options", "tools")
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 3, "temperature": 0.7, **dict.fromkeys(unset)}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] > 0
    body = {"model": MODEL, "prompt": "Count: 1, 2,", "max_tokens": None, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


def test_limits_of_tokens(api, client):
    asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    free = api.completions.create(**asked).choices[0].text
    assert "Paris" in free
    banned = api.completions.create(**asked, extra_body={"bad_words": ["Paris", "Lyon is a city"]}).choices[0].text
    assert "Paris" not in banned
    two = api.completions.create(**asked, extra_body={"bad_words": ["answer is"]}).choices[0].text
    assert two.startswith(free.partition(" is")[0])  # only the second token of the two is forbidden
    assert "answer is" not in two
    ids = client.post("/tokenize", json={"prompt": " oak elm"}).json()["tokens"]
    few = {"allowed_token_ids": ids, "return_token_ids": True}
    assert {*api.completions.create(**asked, extra_body=few).choices[0].token_ids} <= {*ids}
    for wrong, param in (({"allowed_token_ids": [10**6]}, "allowed_token_ids"), ({"bad_words": [" "]}, "bad_words")):
        with pytest.raises(openai.BadRequestError) as error:
            api.completions.create(**asked, extra_body=wrong)
        assert error.value.body["param"] == param
    (tree,) = client.post("/tokenize", json={"prompt": " tree"}).json()["tokens"]
    none_left = {"allowed_token_ids": [tree], "bad_words": ["tree"]}
    with pytest.raises(openai.BadRequestError, match="leave none"):
        api.completions.create(**asked, extra_body=none_left)
    chat = api.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, extra_body={"n_probs": 3})
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [3, 3]


@pytest.mark.parametrize("options", [{"suffix": "x"}, {"best_of": 3}, {"prompt": []}, {"prompt": ""}])
def test_completions_that_are_refused(api, options):
    options = {"model": MODEL, "prompt": "x"} | options
    with pytest.raises(openai.BadRequestError):
        api.completions.create(**options)

"""Invalid requests get a client error in the error schema, and the next valid request still works."""

import http.client
import json
import re
from collections.abc import Iterator

import httpx
import pytest

SCHEMA = "sampling_params.json_schema"
BAD = [
    (b'{"text": "x"', None),
    (b"", None),
    (b"[]", None),
    (b'{"text": "\xff\xfe"}', None),
    (b'{"text": 5}', "text"),
    (b"{}", "text"),
    (b'{"text": "x", "input_ids": [1]}', "text"),
    (b'{"text": ""}', "text"),
    (b'{"text": []}', "text"),
    (b'{"input_ids": [[]]}', "input_ids"),
    (b'{"input_ids": [1, 99999999]}', "input_ids"),
    (b'{"input_ids": [-1]}', "input_ids.0"),
    (b'{"input_ids": [1e400]}', "input_ids.0"),
    (b'{"input_ids": [123456789012345678901234567890]}', "input_ids"),
    (b'{"text": "x", "txet": 1}', "txet"),
    (b'{"text": "x", "sampling_params": {"temprature": 1}}', "sampling_params.temprature"),
    (b'{"text": "x", "sampling_params": {"temperature": -1}}', "sampling_params.temperature"),
    (b'{"text": "x", "sampling_params": {"temperature": NaN}}', "sampling_params.temperature"),
    (b'{"text": "x", "sampling_params": {"top_p": "hot"}}', "sampling_params.top_p"),
    (b'{"text": "x", "sampling_params": {"max_new_tokens": -1}}', "sampling_params.max_new_tokens"),
    (b'{"text": "x", "sampling_params": {"max_new_tokens": 1e30}}', "sampling_params.max_new_tokens"),
    (b'{"text": "", "stream": true}', "text"),
    (b'{"text": [' + b'"x",' * 999 + b'"x"], "sampling_params": {"n": 64, "max_new_tokens": 1}}', "sampling_params.n"),
    (b'{"text": "x", "sampling_params": {"n": 1000}}', "sampling_params.n"),
    (b'{"text": "x", "sampling_params": {"stop": [' + b'"a",' * 40 + b'"b"]}}', "sampling_params.stop"),
    (
        b'{"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 2}}',
        "sampling_params.min_new_tokens",
    ),
    (b'{"text": ["x", "y"], "sampling_params": [{}]}', "sampling_params"),
    (b'{"text": ["x", "y"], "rid": ["same", "same"]}', "rid"),
    (b'{"text": "x", "cache_salt": ""}', "cache_salt"),
    (b'{"text": "x", "return_logprob": true, "logprob_start_len": 50}', "logprob_start_len"),
    (b'{"text": "' + b"word " * 9000 + b'"}', "text"),
    (b"[" * 50_000, None),
    (b"null", None),
    (b'{"text": "x", "te\\ud800xt": 1}', "te\ufffdxt"),
    (b'{"text": "x", "Text": 1}', "Text"),
    (b'{"text": ["x", 5]}', "text.1"),
    (b'{"text": "x", "stream": "yes"}', "stream"),
    (b'{"text": "x", "rid": ""}', "rid"),
    (b'{"text": "x", "priority": 1.5}', "priority"),
    (b'{"input_ids": [[1, "a"]]}', "input_ids.0.1"),
    (b'{"input_ids": [1, true]}', "input_ids.1"),
    (b'{"text": "x", "sampling_params": {"max_new_tokens": "5"}}', "sampling_params.max_new_tokens"),
    (b'{"text": "x", "sampling_params": {"max_new_tokens": ' + b"9" * 5000 + b"}}", None),
    (b'{"text": "x", "sampling_params": {"temperature": Infinity}}', "sampling_params.temperature"),
    (b'{"text": "x", "sampling_params": {"regex": "(a"}}', "sampling_params.regex"),
    (b'{"text": "x", "sampling_params": {"json_schema": "{}", "regex": "a"}}', "sampling_params.regex"),
    (b'{"text": "x", "sampling_params": {"json_schema": "[]"}}', "sampling_params.json_schema"),
    (b'{"text": "x", "sampling_params": {"regex": "' + b"a" * 9000 + b'"}}', "sampling_params.regex"),
    (b'{"text": "x", "timeout_s": 0}', "timeout_s"),
    (b'{"text": "x", "reuse": {"method": "auto", "granularity": "page"}}', "reuse.granularity"),
    (b'{"text": "x", "sampling_params": {"stop": ["a", ""]}}', "sampling_params.stop.1"),
    (b'{"text": "x", "sampling_params": {"logit_bias": {"99999999": 1}}}', "sampling_params.logit_bias"),
    (b'{"text": ["x", "y"], "sampling_params": [{}, {"top_p": 3}]}', "sampling_params.1.top_p"),
    (rb'{"text": "x", "sampling_params": {"json_schema": "{\"a\": NaN}"}}', SCHEMA),
    (b'{"text": "x", "sampling_params": {"json_schema": "{\\"const\\": %d}"}}' % (1 << 64), SCHEMA),
    (b'{"text": "x", "sampling_params": {"repetition_penalty": 5e-324}}', "sampling_params.repetition_penalty"),
    (b'{"text": "x", "sampling_params": {"json_schema": "{\\"$ref\\": \\"#\\"}"}}', "sampling_params.json_schema"),
]


@pytest.fixture(scope="module", autouse=True)
def _valid_requests_still_work(server) -> Iterator[None]:
    yield
    good = httpx.post(f"{server.url}/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})
    assert good.json()["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize(("body", "param"), BAD, ids=range(len(BAD)))
def test_bad_input_is_a_client_error(client, body, param):
    answer = client.post("/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_what_is_no_number_is_not_called_too_large(client, value):
    answer = client.post("/v1/completions", content=f'{{"model": "smollm2", "prompt": "x", "temperature": {value}}}')
    assert answer.json()["error"]["message"] == "temperature: Input should be a finite number"


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-8])
def test_a_temperature_next_to_nothing_is_as_good_as_greedy(client, temperature):
    def ask(value: float) -> list[int]:
        body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4, "temperature": value}}
        return client.post("/generate", json=body).json()["output_ids"]

    assert ask(temperature) == ask(0)


def test_a_stream_whose_events_would_be_megabytes(client):
    body = {"text": "x", "stream": True, "return_logprob": True, "top_logprobs_num": 128}
    answer = client.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 1000}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs_num")
    body |= {"input_ids": [5] * 600, "text": None, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 2}}
    *_, error, done = [line for line in client.post("/generate", json=body).text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert json.loads(error[6:])["error"]["param"] == "top_logprobs_num"
    whole = client.post("/generate", json={**body, "stream": False}).json()
    assert len(whole["meta_info"]["input_top_logprobs"]) == 600


def test_no_answer_repeats_megabytes_of_its_request(client):
    for path, body in (
        ("/generate", b'{"input_ids": [' + b"9" * 4000 + b"]}"),
        ("/v1/completions", json.dumps({"model": "m" * 90_000, "prompt": "x"}).encode()),
    ):
        answer = client.post(path, content=body)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/nope", 404), ("DELETE", "/generate", 405), ("GET", "/v1/models/x", 404)],
)
def test_routing_errors_have_the_schema(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_content_type_is_taken_for_json(server):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/tokenize", body=json.dumps({"prompt": "x"}))
    answer = connection.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["count"] == 1


CHAT = {"model": "smollm2", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}


LONE = "\ud83d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": LONE, "rid": LONE, "cache_salt": LONE, "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/completions", {"model": "smollm2", "max_tokens": 1, "prompt": LONE, "stop": LONE}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": f"a{LONE}"}]}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "description": LONE, "enum": [{"a": LONE}]}}}], "tool_choice": "required"}),
        ("/v1/responses", {"model": "smollm2", "max_output_tokens": 1, "input": [{"role": "user", "content": LONE}]}),
        ("/v1/messages", {**CHAT, "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
            "content": f"cut {LONE}"}]}]}),
    ],
)  # fmt: skip
def test_a_character_that_was_cut_is_replaced(client, path, body):
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_the_replacement_of_a_character(client):
    for given, read in ((LONE, "\ufffd"), ("\\ud83d", "\\ud83d"), ("\U0001f600" + LONE, "\U0001f600\ufffd")):
        answer = client.post("/tokenize", content=json.dumps({"prompt": given})).json()
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == read


@pytest.mark.parametrize("arguments", ["[" * 1100, '"\\ud800"', "NaN", "1e999", "{", ""])
def test_odd_arguments_of_earlier_calls_are_taken_as_text(client, arguments):
    turn = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}
    answer = client.post("/v1/chat/completions", json={**CHAT, "messages": [turn]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/v1/completions", {"model": "smollm2"}, "prompt"),
        ("/v1/completions", {"model": "smollm2", "prompt": "x", "seed": 10**40}, "seed"),
        ("/v1/completions", {"model": "smollm2", "prompt": [1, 2, "x"]}, None),
        ("/v1/chat/completions", {**CHAT, "model": 5}, "model"),
        ("/v1/chat/completions", {"model": "smollm2", "messages": [{"role": "user"}]}, "messages.0"),
        ("/v1/chat/completions", {"model": "smollm2", "messages": "x"}, "messages"),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"minimum": -(1 << 64)}}}},
            "response_format",
        ),
    ],
)
def test_bad_input_to_other_routes(client, path, body, param):
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param


def test_the_openapi_document_is_complete(client):
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), f"{method} {path}"
            (success,) = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            assert all(content["example"] for content in success["content"].values()), f"{method} {path}"
            assert {"4XX", "5XX"} <= operation["responses"].keys()
            assert "422" not in operation["responses"]
    for name in (
        "GenerateRequest",
        "ChatRequest",
        "CompletionRequest",
        "TokenizeRequest",
        "PinRequest",
        "SchemaRequest",
    ):
        assert document["components"]["schemas"][name]["example"]
    for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
        example = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = document["components"]["schemas"][example["$ref"].rsplit("/", 1)[1]]["example"]
        if "model" in body:
            body = {**body, "model": "smollm2", "max_tokens": 2}
        assert client.post(path, json=body).status_code == 200


@pytest.fixture
def things(client) -> Iterator[dict[str, str]]:
    """Values of the parameters of paths: one thing of each kind is there; a pin, and a kept prompt."""
    pin = client.post("/cache/pin", json={"text": "Once upon a time, " * 8}).json()["id"]
    client.post("/v1/schemas", json={"pml": "<schema name='smollm2'>Once</schema>"})
    document = client.post("/v1/documents", json={"text": "Once", "encode": False}).json()["id"]
    kept = {"input": "Once upon a time, " * 8, "max_output_tokens": 1, "prompt_cache_options": {"ttl": "30m"}}
    response = client.post("/v1/responses", json=kept).json()["id"]
    node = client.get("/cache/tree").json()["nodes"][0]
    there = {"{document_id}": document, "{response_id}": response, "{page}": f"{node['id']}?start={node['start']}"}
    yield {"{name}": "smollm2", "{schema_id}": "smollm2", **there}
    made = [f"/cache/pins/{pin}", "/v1/schemas/smollm2", f"/v1/documents/{document}", f"/v1/responses/{response}"]
    assert [client.delete(path).status_code for path in made] == [200] * 4
    assert client.post("/flush_cache?pins=true").status_code == 200


def test_answers_look_as_the_document_says(client, things):
    document = client.get("/openapi.json").json()
    seen = 0
    for path, methods in document["paths"].items():
        # This server has no tiers, and its nodes lie in none.
        if "get" not in methods or path in ("/health_generate", "/cache/tiers"):
            continue
        answer = client.get(re.sub(r"{\w+}", lambda parameter: things[parameter[0]], path))
        ((kind, content),) = methods["get"]["responses"]["200"]["content"].items()
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind), path
        if kind == "application/json":
            assert shape(content["example"]) - {".nodes[].tiers[]"} <= shape(answer.json()), path
        else:
            assert content["example"].split()[0] in answer.text
        seen += 1
    assert seen >= 8


def shape(value, at="") -> set[str]:
    """Paths of all fields of a JSON value; of lists, those of the first element."""
    if isinstance(value, list):
        return shape(value[0], f"{at}[]") if value else set()
    if not isinstance(value, dict):
        return {at}
    return {at} | {found for name, inner in value.items() for found in shape(inner, f"{at}.{name}")}


def test_a_wrong_route_is_not_found_whatever_its_body_is(client):
    answer = client.post("/v1/chat/completion", content=b"x", headers={"content-type": "text/plain"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("; did you mean /v1/chat/completions?")

"""Documents over HTTP: all ways to ask with them, their store, tenants and errors."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from loadgen.offline.document_methods import METHODS
from runtime.features.chunks.documents.table import choose, read_table

GREEDY = {"max_new_tokens": 8, "temperature": 0}
ROME = {
    "title": "Rome",
    "text": "Rome is old. Romulus founded it, and it stands on seven hills by the river Tiber. " * 4,
}
OSLO = {"text": "Oslo lies in the north, by a long fjord, and its winters are dark. Ships leave for Kiel. " * 4}
QUESTION = "\nWhich city stands on hills?"
SEGMENTS = [{"text": "Read this.\n"}, {"document": ROME}, {"text": "\n"}, {"document": OSLO}, {"text": QUESTION}]
PARTS = [{"type": "document", "document": ROME}, {"type": "document", "document": OSLO}]


def generate(client, **fields) -> dict:
    body = {"segments": SEGMENTS, "sampling_params": GREEDY, **fields}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def add(client):
    """Stores documents, and forgets them at the end; nothing is cached before."""
    client.post("/flush_cache")
    ids = []

    def add(document: dict = ROME, **fields) -> dict:
        response = client.post("/v1/documents", json={**document, **fields})
        assert response.status_code == 200, response.text
        ids.append(response.json()["id"])
        return response.json()

    yield add
    for name in set(ids):
        assert client.delete(f"/v1/documents/{name}").status_code == 200


# -- the store


def test_a_document_for_which_the_pool_is_too_small(client):
    """It fits in the model's context, but not twice: the method looks at all rows first."""
    segments = [{"document": {"text": " ".join(map(str, range(1000, 2000)))}}, {"text": QUESTION}]
    body = {"segments": segments, "reuse": {"method": "a3"}, "sampling_params": GREEDY}
    response = client.post("/generate", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_store_list_and_delete(client, add):
    made = add(ROME, ttl_s=60, encode=False)
    assert (made["title"], made["chunks"], made["cached"], made["pins"]) == ("Rome", 1, 0, [])
    again = add(ROME, encode=False, chunk_tokens=16)
    assert 0 < made.pop("expires_in_s") <= 60
    assert again == {**made, "chunks": 5, "expires_in_s": None}
    del made["chunks"], made["cached"]
    other = add(OSLO, encode=False)
    assert other["title"] is None
    listed = client.get("/v1/documents").json()["data"]
    assert listed[0] == {**made, "expires_in_s": None}
    assert [one["id"] for one in listed] == [made["id"], other["id"]]
    assert client.get(f"/v1/documents/{made['id']}?chunk_tokens=16").json() == again
    assert client.delete(f"/v1/documents/{other['id']}").json() == {"success": True}
    for method in (client.get, client.delete):
        response = method(f"/v1/documents/{other['id']}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "document_not_found")
    add(OSLO, encode=False)


def test_a_document_is_encoded_ahead_once(client, add):
    made = add(ROME)
    assert made["cached"] == made["tokens"]
    reuse = generate(client, reuse={"method": "pie"})["meta_info"]["reuse"]
    assert (reuse["documents"], reuse["computed_documents"]) == (["Rome", add(OSLO)["id"]], [add(OSLO)["id"]])
    assert generate(client, reuse={"method": "pie"})["meta_info"]["reuse"]["computed_documents"] == []
    client.post("/flush_cache")
    assert client.get(f"/v1/documents/{made['id']}").json()["cached"] == 0


def test_a_salt_and_the_length_of_chunks_are_those_of_requests_to_come(client, add):
    made = add(ROME, cache_salt="mine", chunk_tokens=16)
    assert (made["chunks"], made["cached"]) == (5, made["tokens"] - made["tokens"] % 16)
    queries = {"?cache_salt=mine&chunk_tokens=16": made["cached"], "?cache_salt=mine": 0, "?chunk_tokens=16": 0, "": 0}
    for query, cached in queries.items():
        assert client.get(f"/v1/documents/{made['id']}{query}").json()["cached"] == cached
    assert client.get(f"/v1/documents/{made['id']}?chunk_tokens=15").status_code == 400
    for fields, computed in [
        ({"cache_salt": "mine", "reuse": {"method": "pie", "chunk_tokens": 16}}, []),
        ({"cache_salt": "mine", "reuse": {"method": "pie"}}, ["Rome"]),
        ({"reuse": {"method": "pie", "chunk_tokens": 16}}, ["Rome"]),
    ]:
        segments = [{"document": {"id": made["id"]}}, {"text": QUESTION}]
        reuse = generate(client, segments=segments, **fields)["meta_info"]["reuse"]
        assert reuse["computed_documents"] == computed


@pytest.mark.parametrize("method", ["passages", "a3"])
def test_the_method_is_that_of_requests_to_come(client, add, method):
    """`passages` reads documents that are encoded behind a text; all others read the same KV."""
    made = add(ROME, method=method)
    for other in METHODS:
        cached = client.get(f"/v1/documents/{made['id']}?method={other}").json()["cached"]
        assert cached == (made["tokens"] if (other == "passages") == (method == "passages") else 0)
    reads = {"passages": [], "pie": ["Rome"]} if method == "passages" else {"passages": ["Rome"], "pie": []}
    for other, computed in reads.items():
        segments = [{"document": {"id": made["id"]}}, {"text": QUESTION}]
        reuse = generate(client, segments=segments, reuse={"method": other})["meta_info"]["reuse"]
        assert reuse["computed_documents"] == computed


def test_a_pinned_document_survives_a_flush(client, add):
    made = add(ROME, pin=True, chunk_tokens=16)
    held = client.get("/cache/pins").json()["pins"]
    assert {pin["id"] for pin in held} == set(made["pins"])
    assert {pin["name"] for pin in held} == {made["id"]}
    client.post("/flush_cache")
    assert (
        client.get(f"/v1/documents/{made['id']}?chunk_tokens=16").json()["cached"]
        == made["tokens"] - made["tokens"] % 16
    )
    again = add(ROME, pin=True, chunk_tokens=16)
    assert len(again["pins"]) == len(held) == len(client.get("/cache/pins").json()["pins"])
    assert [pin["expires_in_s"] for pin in held] == [None] * len(held)
    add(ROME, ttl_s=60, chunk_tokens=16)
    renewed = client.get("/cache/pins").json()["pins"]
    assert all(0 < pin["expires_in_s"] <= 60 for pin in renewed)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tokens: add(ROME, pin=True, chunk_tokens=tokens), (16, 32, 512, 64)))
    held = client.get("/cache/pins").json()["pins"]
    assert {pin["id"] for pin in held} == set(client.get(f"/v1/documents/{made['id']}").json()["pins"])
    client.delete(f"/v1/documents/{made['id']}")
    assert client.get("/cache/pins").json()["pins"] == []
    add(ROME)


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"text": ""}, "text: ", "text"),
        ({"title": "x"}, "text: Field required", "text"),
        ({"text": "x", "title": ""}, "title: ", "title"),
        ({"text": "x", "title": "x" * 257}, "title: ", "title"),
        ({"text": "x", "chunk_tokens": 15}, "chunk_tokens: ", "chunk_tokens"),
        ({"text": "x", "ttl_s": 0}, "ttl_s: ", "ttl_s"),
        ({"text": "word " * 9000}, "the document has 9001 tokens", "text"),
        ({"text": "x", "reuse": {}}, "unknown field", "reuse"),
    ],
)
def test_a_document_that_cannot_be_served_is_not_stored(client, body, words, param):
    response = client.post("/v1/documents", content=json.dumps(body), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert client.get("/v1/documents").json()["data"] == []


# -- /generate


def test_without_reuse_segments_are_an_ordinary_prompt(client, tokenizer):
    texts = ["Read this.\n", f"{ROME['title']}\n{ROME['text']}", "\n", OSLO["text"], QUESTION]
    ids = [token for text in texts for token in tokenizer.encode(text)]
    plain = client.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    for fields in ({}, {"reuse": {"method": "none"}}, {"reuse": {"method": "auto", "max_kl": 0}}):
        answer = generate(client, **fields)
        assert answer["output_ids"] == plain["output_ids"]
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == len(ids)
        reuse = meta["reuse"]
        assert reuse.pop("auto", None) == ("no method was shown to lose so little" if "auto" in str(fields) else None)
        cached = meta["cached_tokens"]
        told = {"strategy": "prefix", "exact": True, "method": "none", "documents": ["Rome", reuse["documents"][1]]}
        assert reuse == {**told, "reused_tokens": cached, "computed_tokens": len(ids) - cached}
        assert cached > 0
    assert "reuse" not in plain["meta_info"]


def test_auto_takes_what_was_measured_for_the_default_model(client, default_model_dir):
    """Within the bounds of the table that comes with Ramet, the cheapest."""
    for bound in (0.05, 100):
        best = choose(read_table(default_model_dir), bound)
        reuse = generate(client, reuse={"method": "auto", "max_kl": bound})["meta_info"]["reuse"]
        assert (reuse["method"], reuse["auto"]) == (best.method, f"measured KL {best.kl:g}")
    by_answers = generate(client, reuse={"method": "auto"})["meta_info"]["reuse"]
    assert (by_answers["method"], by_answers["auto"]) == ("none", "no method was shown to lose so little")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_and_says_so(client, method):
    meta = generate(client, reuse={"method": method})["meta_info"]
    reuse = meta["reuse"]
    assert (reuse["strategy"], reuse["method"], reuse["exact"]) == ("fusion", method, False)
    assert reuse["reused_tokens"] + reuse["computed_tokens"] == meta["prompt_tokens"]
    assert len(reuse["documents"]) == 2


@pytest.mark.parametrize("method", ["a3", "legolink"])
def test_a_ratio_of_one_is_full_prefill(client, method):
    """Also where the last chunks are too short to be reused."""
    for chunks in ({}, {"chunk_tokens": 64}):
        assert generate(client, reuse={"method": method, "ratio": 1, **chunks})["text"] == generate(client)["text"]


def test_nothing_of_a_short_document_is_computed_ahead(add):
    made = add({"text": "The market of Tor is held on Thursdays."})
    assert (made["chunks"], made["cached"], made["pins"]) == (0, 0, [])


def test_options_of_a_request_hold_with_documents_too(client):
    fields = {"reuse": {"method": "legolink"}}
    whole = generate(client, **fields)
    batch = generate(client, segments=[SEGMENTS, SEGMENTS[:1] + SEGMENTS[3:]], **fields)
    assert batch[0]["text"] == whole["text"]
    assert [len(one["meta_info"]["reuse"]["documents"]) for one in batch] == [2, 1]
    several = generate(client, sampling_params={**GREEDY, "n": 2}, return_logprob=True, **fields)
    assert [one["text"] for one in several] == [whole["text"]] * 2
    assert len(several[0]["meta_info"]["output_token_logprobs"]) == 8
    assert len(generate(client, sampling_params={**GREEDY, "regex": "[a-c]{3}"}, **fields)["text"]) == 3
    response = client.post(
        "/generate", json={"segments": SEGMENTS, "sampling_params": GREEDY, "stream": True, **fields}
    )
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["reuse"]["method"] == "legolink"
    assert not any("reuse" in event["meta_info"] for event in events[:-1])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"segments": []}, 400, "text"),
        ({"segments": [[]]}, 400, "segments"),
        ({"segments": [{}]}, 400, "segments.0"),
        ({"segments": [{"text": "x", "document": ROME}]}, 400, "segments.0"),
        ({"segments": [{"document": {}}]}, 400, "segments.0.document"),
        ({"segments": [{"document": {"id": "x", "text": "x"}}]}, 400, "segments.0.document"),
        ({"segments": [{"document": {"id": "x", "title": "x"}}]}, 400, "segments.0.document"),
        ({"segments": [{"document": {"text": ""}}]}, 400, "segments.0.document.text"),
        ({"segments": [{"document": {"text": "x", "txet": "x"}}]}, 400, "segments.0.document.txet"),
        ({"segments": [{"document": {"id": "doc-1"}}]}, 404, "document"),
        ({"segments": [{"text": "x"}] * 4097}, 400, "segments"),
        ({"segments": [{"document": {"text": "x"}}] * 513}, 400, "segments"),
        ({"segments": [{"document": {"text": "word " * 9000}}]}, 400, "segments"),
        ({"text": "x"}, 400, "text"),
        ({"segments": [{"text": "x"}], "reuse": {"method": "pie"}}, 400, "reuse"),
        ({"segments": None, "text": "x", "reuse": {"method": "pie"}}, 400, "reuse"),
        ({"reuse": {"method": "best"}}, 400, "reuse.method"),
        ({"reuse": {}}, 400, "reuse.method"),
        ({"reuse": "pie"}, 400, "reuse"),
        ({"reuse": {"method": "pie", "ratio": 0.1}}, 400, "reuse.ratio"),
        ({"reuse": {"method": "a3", "ratio": 1.5}}, 400, "reuse.ratio"),
        ({"reuse": {"method": "a3", "ratio": "0.1"}}, 400, "reuse.ratio"),
        ({"reuse": {"method": "a3", "methid": 1}}, 400, "reuse.methid"),
        ({"reuse": {"method": "a3"}, "return_logprob": True, "logprob_start_len": 0}, 400, "reuse"),
    ],
)
def test_a_request_that_does_not_fit(client, fields, status, param):
    response = client.post("/generate", json={"segments": SEGMENTS, "sampling_params": GREEDY, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


# -- chat


def chat(api, parts: list, **fields):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    extra = {"extra_body": {"reuse": {"method": "legolink"}, **fields.pop("extra", {})}}
    return api.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=8, temperature=0, **extra, **fields
    )


def test_parts_ids_and_the_field_documents_are_the_same_conversation(api, add):
    ids = [{"id": add(document)["id"]} for document in (ROME, OSLO)]
    question = {"type": "text", "text": "Which city stands on hills?"}
    whole = chat(api, [*PARTS, question])
    assert whole.reuse["method"] == "legolink"
    assert whole.reuse["documents"] == ["Rome", ids[1]["id"]]
    assert whole.reuse["computed_documents"] == []
    other = [{"type": "document", "document": one} for one in ids]
    for parts, extra in [
        ([*other, question], {}),
        ([question], {"documents": ids}),
        (question["text"], {"documents": ids}),
    ]:
        answer = chat(api, parts, extra=extra)
        assert answer.choices[0].message.content == whole.choices[0].message.content
        assert answer.usage.prompt_tokens == whole.usage.prompt_tokens
    plain = api.chat.completions.create(
        model="smollm2",
        max_tokens=8,
        temperature=0,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Rome\n{ROME['text']}\n{OSLO['text']}\n{question['text']}"},
        ],
    )
    without = chat(api, [*PARTS, question], extra={"reuse": {"method": "none"}})
    assert without.choices[0].message.content == plain.choices[0].message.content
    assert abs(without.usage.prompt_tokens - plain.usage.prompt_tokens) <= 3  # line breaks are tokenized alone


def test_the_last_chunk_of_a_stream_says_what_was_reused(api):
    parts = [*PARTS, {"type": "text", "text": "Which city stands on hills?"}]
    chunks = list(chat(api, parts, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(api, parts).choices[0].message.content
    assert chunks[-1].reuse["method"] == "legolink"
    assert not any(hasattr(chunk, "reuse") for chunk in chunks[:-1])


def test_later_turns_and_tools_go_with_documents(api):
    question = {"type": "text", "text": "Which?"}
    first = [{"role": "user", "content": [*PARTS, question]}]
    extra = {"extra_body": {"reuse": {"method": "pie"}}}
    said = api.chat.completions.create(model="smollm2", messages=first, max_tokens=8, temperature=0, **extra)
    turns = [
        *first,
        {"role": "assistant", "content": said.choices[0].message.content},
        {"role": "user", "content": "Why?"},
    ]
    later = api.chat.completions.create(model="smollm2", messages=turns, max_tokens=4, temperature=0, **extra)
    assert later.reuse["computed_documents"] == []
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    called = api.chat.completions.create(
        model="smollm2", messages=first, tools=[tool], tool_choice="required", max_tokens=64, **extra
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": [{"role": "assistant", "content": PARTS}]}, 400, "messages.0"),
        ({"messages": [{"role": "tool", "content": PARTS, "tool_call_id": "x"}]}, 400, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "messages.0.content.0.document"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "document": {"id": "x"}}]}]}, 404, "document"),
        ({"messages": [{"role": "user", "content": "x"}], "reuse": {"method": "pie"}}, 400, "reuse"),
        ({"messages": [{"role": "system", "content": "x"}], "documents": [ROME]}, 400, "documents"),
        ({"documents": [{"text": "x", "id": "y"}]}, 400, "documents.0"),
        ({"documents": [{"text": "x"}] * 4097}, 400, "documents"),
        ({"schema": "s"}, 400, "schema"),
        ({"messages": [{"role": "user", "content": "x"}], "schema": "s", "documents": [ROME]}, 400, "schema"),
        ({"reuse": {"method": "a3", "k": 3}}, 400, "reuse.k"),
    ],
)
def test_a_conversation_that_does_not_fit(client, fields, status, param):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": PARTS}], "max_tokens": 2, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_a_diffusion_model_reads_documents_and_reuses_none(denoiser):
    body = {"segments": SEGMENTS, "sampling_params": {"max_new_tokens": 4}}
    with httpx.Client(base_url=denoiser.url, timeout=60) as client:
        assert client.post("/generate", json=body).status_code == 200
        refused = client.post("/generate", json={**body, "reuse": {"method": "a3"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reuse")
        refused = client.post("/v1/documents", json=ROME)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")

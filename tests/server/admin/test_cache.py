"""The operator's cache routes over a live server."""

from array import array

import pytest

from server.admin.cache import preview_tokens

TEXT = "A long system prompt that every request of this service begins with, word for word. " * 4


@pytest.mark.parametrize("how", ["text", "input_ids", "messages"])
def test_pin_list_unpin(client, how):
    client.post("/flush_cache?pins=true")
    messages = [{"role": "system", "content": TEXT}]
    ids = client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    body = {"text": {"text": TEXT}, "input_ids": {"input_ids": ids}, "messages": {"messages": messages}}[how]
    made = client.post("/cache/pin", json={**body, "name": how, "ttl_s": 60})
    assert made.status_code == 200, made.text
    pin = made.json()
    assert pin["name"] == how
    assert 0 < pin["expires_in_s"] <= 60
    assert client.post("/flush_cache").json()["live_tokens"] == pin["tokens"]
    if how == "messages":
        body = {"model": "smollm2", "messages": [*messages, {"role": "user", "content": "Hi"}], "max_tokens": 1}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= pin["tokens"]
    listed = client.get("/cache/pins").json()
    assert [p["id"] for p in listed["pins"]] == [pin["id"]]
    assert listed["pinned_tokens"] == pin["tokens"] <= listed["budget_tokens"]
    assert client.get("/cache/stats").json()["pins"] == 1
    assert client.delete(f"/cache/pins/{pin['id']}").json() == {"success": True}
    assert client.delete(f"/cache/pins/{pin['id']}").status_code == 404
    assert client.post("/flush_cache").json()["live_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/cache/pin", {"text": f"Nobody waits for this. {TEXT}"}),
        ("/v1/schemas", {"pml": f"<schema name='left'>Nobody waits. {TEXT}</schema>", "encode": True}),
        ("/v1/documents", {"text": f"Nobody waits for that. {TEXT}"}),
    ],
)
def test_who_leaves_while_a_prefix_is_computed_leaves_nothing_to_compute(client, server, path, body):
    client.post("/flush_cache?pins=true")
    server.leave(path, body)
    assert client.get("/cache/pins").json()["pins"] == client.get("/v1/schemas").json()["data"] == []
    assert client.get("/v1/documents").json()["data"] == []


def test_a_prefix_with_documents_is_pinned(client):
    messages = [{"role": "user", "content": [{"type": "document", "document": {"text": TEXT}}]}]
    pin = client.post("/cache/pin", json={"messages": messages}).json()
    ask = {"model": "smollm2", "messages": messages, "max_tokens": 1}
    usage = client.post("/v1/chat/completions", json=ask).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= pin["tokens"] > 16
    assert client.delete(f"/cache/pins/{pin['id']}").status_code == 200


def test_a_pin_over_the_budget_is_409_with_the_figures(client):
    answer = client.post("/cache/pin", json={"input_ids": [5] * 5000})
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["type"] == "pin_refused"
    assert "256 pages" in error["message"]


def test_a_pin_that_fills_no_page_is_400(client):
    answer = client.post("/cache/pin", json={"input_ids": [5] * 15})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the prefix is shorter than a page of 16 tokens; pins hold whole pages"


@pytest.mark.parametrize(
    "body",
    [{}, {"text": ""}, {"text": "x", "input_ids": [1]}, {"text": TEXT, "ttl_s": -1}, {"text": TEXT, "colour": 1}],
)
def test_bad_pins_are_client_errors(client, body):
    answer = client.post("/cache/pin", json=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_preview_of_a_module_has_no_padding():
    assert preview_tokens(array("i", [7, 0, 9, -1, -1]).tobytes()) == [7, 0, 9]

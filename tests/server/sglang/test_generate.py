"""`/generate` and the routes about the server, over a live server."""

import json
import time
from itertools import pairwise

import httpx

from tests.server.conftest import PATIENCE_S

GREEDY = {"temperature": 0, "max_new_tokens": 8}
# Of a request that is under way when something happens to it; it has to be ended.
ENDLESS = {"max_new_tokens": 6000, "ignore_eos": True}


def ask(client, **body):
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path="/generate", **body):
    """The events of a stream, framing checked."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = b"".join(answer.iter_raw()).decode()
    assert text.endswith("data: [DONE]\n\n")
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def events_until(wanted, client, **body):
    """The events of a stream, again until they are as wanted: a reader that stood still has several steps as one."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(parts := events(client, **body)):
        assert time.monotonic() < deadline, parts
    return parts


def test_text_ids_and_meta(client):
    one = ask(client, text="The capital of France is", sampling_params=GREEDY)
    assert one["text"].startswith(" Paris")
    meta = one["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], len(one["output_ids"])) == (5, 8, 8)
    assert meta["e2e_latency"] >= meta["queue_time"] >= 0
    ids = client.post("/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    assert ask(client, input_ids=ids, sampling_params=GREEDY)["output_ids"] == one["output_ids"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["text"] == "The capital of France is"


def test_batches_and_n(client):
    several = ask(client, text=["Once upon a time", "The capital of France is"], sampling_params=[GREEDY, GREEDY])
    assert several[1]["text"].startswith(" Paris")
    many = ask(client, text=["a", "b"], sampling_params={"n": 2, "max_new_tokens": 3, "seed": 1}, rid=["r1", "r2"])
    assert [entry["meta_info"]["id"] for entry in many] == ["r1", "r1", "r2", "r2"]


def test_of_a_batch_that_is_refused_in_part_nothing_runs(client, server):
    before = server.state()["aborted_requests"]
    body = {"text": ["a", "b"], "rid": ["same", "same"], "sampling_params": ENDLESS}
    assert client.post("/generate", json=body).status_code == 400
    server.wait(lambda state: state["aborted_requests"] == before + 1)


def test_stream_is_cumulative_with_deltas(client):
    whole = ask(client, text="Once upon a time", sampling_params=GREEDY)
    parts = events(client, text="Once upon a time", sampling_params=GREEDY)
    assert parts[-1]["text"] == whole["text"] == "".join(part["delta"] for part in parts)
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert [part["meta_info"]["finish_reason"] is None for part in parts] == [True] * (len(parts) - 1) + [False]
    for before, after in pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert after["meta_info"]["completion_tokens"] == len(after["output_ids"])


def test_stream_of_a_batch_tells_the_index(client):
    parts = events(client, text=["Once upon", "The capital of France is"], sampling_params={**GREEDY, "n": 2})
    texts = ["".join(p["delta"] for p in parts if p["index"] == index) for index in range(4)]
    assert [text.startswith(" Paris") for text in texts] == [False, False, True, True]
    assert sum(p["meta_info"]["finish_reason"] is not None for p in parts) == 4


def test_logprobs(client):
    answer = ask(
        client,
        text="The capital of France is",
        sampling_params=GREEDY,
        return_logprob=True,
        top_logprobs_num=3,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )["meta_info"]
    assert len(answer["output_token_logprobs"]) == len(answer["output_top_logprobs"]) == 8
    value, token, text = answer["output_token_logprobs"][0]
    assert answer["output_top_logprobs"][0][0] == [value, token, text]
    assert text == " Paris"
    assert answer["input_token_logprobs"][0][0] is None
    assert len(answer["input_token_logprobs"]) == 5


def test_an_event_of_a_stream_holds_so_many_log_probabilities(guarded):
    """Of the prompt and the output together; a whole answer repeats nothing and has no bound."""
    asked = {"input_ids": [5] * 509, "sampling_params": {"max_new_tokens": 1}, "top_logprobs_num": 128}
    headers = {"Authorization": "Bearer alice-secret-key"}
    for start, stream, refused in ((0, True, True), (508, True, False), (0, False, False)):
        body = {**asked, "return_logprob": True, "logprob_start_len": start, "stream": stream}
        answer = httpx.post(f"{guarded.url}/generate", json=body, headers=headers)
        assert ('"param":"top_logprobs_num"' in answer.text) == refused


def test_stop_strings(client):
    body = {"text": "1, 2, 3, 4,", "sampling_params": {"temperature": 0, "max_new_tokens": 20, "stop": "7"}}
    answer = ask(client, **body)
    assert answer["text"] == " 5, 6, "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "7"}
    assert events(client, **body)[-1]["text"] == answer["text"]
    longer = {**body["sampling_params"], "stop": [", 6, 7", "never"]}
    parts = events(client, text=body["text"], sampling_params=longer)
    assert "".join(part["delta"] for part in parts) == parts[-1]["text"] == " 5"
    assert all(" 5".startswith(part["text"]) for part in parts)
    assert ask(client, text=body["text"], sampling_params={**longer, "no_stop_trim": True})["text"] == " 5, 6, 7"


def test_abort_by_id(client, server):
    with client.stream(
        "POST",
        "/generate",
        json={"text": "Count:", "stream": True, "rid": "long", "sampling_params": ENDLESS},
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        for rid, count in (("unknown", 0), ("long", 1)):
            assert client.post("/abort_request", json={"rid": rid}).json() == {"success": count > 0, "aborted": count}
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last[6:])["meta_info"]["finish_reason"]["type"] == "abort"


def test_routes_about_the_server(client):
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
    # Load balancers send HEAD.
    assert [client.head(path).status_code for path in ("/health", "/ready")] == [200, 200]
    info = client.get("/model_info").json()
    assert (info["served_model_name"], info["context_length"]) == ("smollm2", 8192)
    assert client.get("/get_model_info").json() == info
    assert client.get("/server_info").json()["config"]["server"]["host"] == "127.0.0.1"
    ask(client, text="x", sampling_params=GREEDY)
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in metrics.text.splitlines() if not line.startswith("#"))
    label = '{model_name="smollm2"}'
    for name in (
        "sglang:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:time_to_first_token_seconds_count",
    ):
        assert float(values[name + label]) > 0
    assert float(values["sglang:num_running_reqs" + label]) == 0


def test_the_load_is_that_of_running_requests(client, server):
    with server.leaving("/generate", {"text": "Count: 1, 2,", "sampling_params": ENDLESS}):
        server.wait(lambda state: state["running"] == 1 and state["pages_private"] > 1)
        (load,) = client.get("/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 0)
    assert load["num_used_tokens"] >= 32
    assert load["num_used_tokens"] == round(load["token_usage"] * load["max_total_num_tokens"])
    assert load["utilization"] == 1 / load["max_running_requests"]


def test_each_prompt_may_have_its_own_log_probabilities(client):
    body = {"text": ["Once upon", "The capital of"], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    lists = {"return_logprob": [True, False], "top_logprobs_num": [2, 0], "logprob_start_len": [0, -1]}
    first, second = (one["meta_info"] for one in client.post("/generate", json={**body, **lists}).json())
    assert len(first["output_top_logprobs"][0]) == 2
    assert len(first["input_token_logprobs"]) == first["prompt_tokens"]
    assert not [name for name in second if "logprobs" in name]
    single = {name: values[0] for name, values in lists.items()}
    alone = client.post("/generate", json={**body, "text": body["text"][0], **single}).json()["meta_info"]
    assert alone["output_top_logprobs"] == first["output_top_logprobs"]
    answer = client.post("/generate", json={**body, "return_logprob": [True]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_logprob")

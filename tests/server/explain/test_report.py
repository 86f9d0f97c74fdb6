"""Reasons for misses, as a live server tells them on its routes."""

import json

import httpx
import pytest

from runtime.features.diffusion.ask import SharedPrefixReport
from server.explain.report import _not_by_prefix
from tests.server.openai.test_openai import MODEL

HELP = "You are the helpful assistant of a travel agency. " * 6
ASK = {"role": "user", "content": "Where is Rome? " * 6}
BEGIN = "<|im_start|>system\n"


def system(day: str) -> dict:
    return {"role": "system", "content": f"Today is {day}. {HELP}"}


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": "Gives something."}}


def chat(client, *messages, **options) -> tuple[str, dict]:
    """The id of an answer, and its explanation."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, **options}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if "explain" in told:
        assert told["explain"]["cached_tokens"] == told["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert told["explain"]["prompt_tokens"] == told["usage"]["prompt_tokens"]
    return told["id"], told


@pytest.fixture
def clean(client):
    chat(client, ASK, explain=True)  # what leaves is remembered from then on
    client.post("/flush_cache").raise_for_status()
    yield client
    client.post("/flush_cache?pins=true")  # prompts with `prompt_cache_options` are kept


def test_parts_that_differ_beside_the_nearest_prompt_and_an_earlier_answer(clean):
    first, told = chat(clean, system("Monday"), ASK, cache_salt="parts", explain=True)
    assert (told["explain"]["reason"], told["explain"]["parting"]) == ("never_here", None)
    _, told = chat(clean, system("Tuesday"), ASK, cache_salt="parts", explain=True)
    near = told["explain"]
    assert (near["reason"], near["compared_with"], near["cached_tokens"]) == ("system_differs", "nearest", 5)
    assert near["missed_tokens"] == near["prompt_tokens"] - 5
    parting = near["parting"]
    assert (parting["token"], parting["part"], parting["offset"]) == (5, "system", len("Today is "))
    assert parting["before"] == BEGIN + "Today is "
    assert parting["here"].startswith("Tuesday. You are")
    assert parting["there"].startswith("Monday. You are")
    _, told = chat(clean, system("Friday"), ASK, cache_salt="parts", comparison_response_id=first)
    assert told["explain"]["parting"]["there"].startswith("Monday. You are")
    assert first in told["explain"]["message"]
    assert "prompt_cache_diagnostics" not in told
    options = {"cache_salt": "parts", "prompt_cache_options": {"comparison_response_id": first}}
    told = chat(clean, system("Sunday"), ASK, **options)[1]
    assert told["prompt_cache_diagnostics"] == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": told["explain"]["missed_tokens"],
        "comparison_reusable_tokens": 5,
    }
    told = chat(clean, system("Monday"), ASK, **options)[1]
    assert (told["explain"]["reason"], told["prompt_cache_diagnostics"]) == ("hit", {"type": "cache_hit"})


def test_tools_that_differ_come_or_go(clean):
    with_tool, _ = chat(clean, system("noon"), ASK, tools=[tool("get_weather")])
    without, told = chat(clean, system("noon"), ASK, comparison_response_id=with_tool)
    assert told["explain"]["reason"] == "tools_differ", "they are described behind the system message"
    assert told["explain"]["parting"]["there"].lstrip().startswith("You may call these functions")
    options = {"tools": [tool("set_weather")], "prompt_cache_options": {"comparison_response_id": with_tool}}
    told = chat(clean, system("noon"), ASK, **options)[1]
    assert told["explain"]["reason"] == "tools_differ"
    assert told["explain"]["parting"]["here"].startswith("set_weather")
    assert told["prompt_cache_diagnostics"]["reason"] == "tools_changed"
    told = chat(clean, system("noon"), ASK, tools=[tool("sell_tickets")], comparison_response_id=without)[1]
    assert told["explain"]["reason"] == "tools_differ"


def test_a_message_that_differs_and_a_conversation_that_goes_on(clean):
    first, _ = chat(clean, system("noon"), ASK)
    turns = [ASK, {"role": "assistant", "content": "In Italy."}, {"role": "user", "content": "And Oslo? " * 9}]
    second, told = chat(clean, system("noon"), *turns, comparison_response_id=first)
    assert (told["explain"]["reason"], told["explain"]["parting"]) == ("hit", None)
    assert "the rest is new" in told["explain"]["message"]
    turns[1] = {"role": "assistant", "content": "In Spain."}
    _, told = chat(clean, system("noon"), *turns, comparison_response_id=second)
    assert told["explain"]["reason"] == "messages_differ"
    parting = told["explain"]["parting"]
    assert (parting["part"], parting["index"], parting["offset"]) == ("message", 2, len("In "))
    assert parting["here"].startswith("Spain.")
    assert parting["there"].startswith("Italy.")


def test_new_text_behind_all_that_is_cached(clean):
    text = "Many stems grow from one shared root, and each of them is a ramet. " * 4
    options = {"sampling_params": {"max_new_tokens": 1}, "explain": True, "cache_salt": "new"}
    told = [
        clean.post("/generate", json={"text": asked, **options}).json()["meta_info"]
        for asked in (text, text + "What is a genet? Explain it in your own words, and name three of them. " * 3)
    ]
    assert [one["explain"]["reason"] for one in told] == ["never_here", "new_text"]
    assert told[1]["cached_tokens"] >= told[0]["prompt_tokens"] // 16 * 16
    assert f"was read: {told[1]['cached_tokens']} tokens" in told[1]["explain"]["message"]


def test_what_was_flushed_was_not_stored_is_too_short_or_has_another_salt(clean):
    first, _ = chat(clean, system("noon"), ASK)
    clean.post("/flush_cache")
    told = chat(clean, system("noon"), ASK, explain=True)[1]["explain"]
    assert (told["reason"], told["cached_tokens"]) == ("flushed", 0)
    assert "was flushed " in told["message"]
    clean.post("/flush_cache")
    told = chat(clean, system("noon"), ASK, comparison_response_id=first)[1]["explain"]
    assert (told["reason"], told["compared_with"]) == ("flushed", first)
    options = {"cache_salt": "s", "comparison_response_id": first}
    told = chat(clean, system("noon"), ASK, **options)[1]
    assert (told["explain"]["reason"], told["explain"]["parting"]) == ("other_salt", None)
    options |= {"cache_salt": "t", "prompt_cache_options": {"comparison_response_id": "chatcmpl-none"}}
    del options["comparison_response_id"]
    told = chat(clean, system("noon"), ASK, **options)[1]
    assert told["explain"]["reason"] == "comparison_not_found"
    assert told["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    body = {"text": "Hi", "explain": True, "sampling_params": {"max_new_tokens": 1}}
    assert clean.post("/generate", json=body).json()["meta_info"]["explain"]["reason"] == "too_short"
    whole = {"explain": True, "sampling_params": {"max_new_tokens": 1}}
    ids = {**whole, "input_ids": [9] * 16}  # exactly a page
    told = [clean.post("/generate", json=ids).json()["meta_info"] for _ in range(2)]
    assert [(one["explain"]["reason"], one["cached_tokens"]) for one in told] == [("never_here", 0), ("hit", 15)]
    for ids in ([7] * 32, [8] * 33):  # the last page of the first is never matched as a whole: one token is computed
        told = [clean.post("/generate", json={**whole, "input_ids": ids}).json() for _ in range(2)][1]["meta_info"]
        assert (told["explain"]["reason"], told["cached_tokens"]) == ("hit", len(ids) - 1)
    body |= {"text": HELP, "return_logprob": True, "logprob_start_len": 3}
    clean.post("/generate", json=body)
    assert clean.post("/generate", json=body).json()["meta_info"]["explain"]["reason"] == "not_read"


def test_an_aborted_prompt_was_not_stored(clean, server):
    body = {"text": f"Nobody waits for this. {HELP}", "rid": "left", "sampling_params": {"max_new_tokens": 1}}
    server.leave("/generate", body)
    told = clean.post("/generate", json={**body, "rid": "again", "comparison_response_id": "left"}).json()["meta_info"]
    assert (told["explain"]["reason"], told["explain"]["parting"]) == ("not_stored", None)


def test_a_prompt_that_is_not_to_be_stored_is_not_remembered(clean):
    body = {"text": HELP, "rid": "unstored", "cache": {"store": False}, "sampling_params": {"max_new_tokens": 0}}
    clean.post("/generate", json=body).raise_for_status()
    told = clean.post("/generate", json={**body, "rid": "later", "comparison_response_id": "unstored"}).json()
    assert told["meta_info"]["explain"]["reason"] == "comparison_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_generate_and_completions_tell_it_for_each_prompt(clean, stream):
    prompts = [f"Tell me about Rome. {HELP}", f"Tell me about Oslo. {HELP}"]
    for path, body in (
        ("/generate", {"text": prompts, "sampling_params": {"max_new_tokens": 2, "n": 2}}),
        ("/v1/completions", {"model": MODEL, "prompt": prompts, "max_tokens": 2, "n": 2}),
    ):
        clean.post("/flush_cache")
        body |= {"explain": True, "stream": stream}
        clean.post(path, json={**body, "explain": False, "cache_salt": path}).raise_for_status()
        answer = clean.post(path, json={**body, "cache_salt": path})
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            told = [event["meta_info"] if "meta_info" in event else event["choices"][0] for event in events]
        else:
            told = [one["meta_info"] for one in answer.json()] if path == "/generate" else answer.json()["choices"]
        found = [one["explain"] for one in told if "explain" in one]
        assert [one["reason"] for one in found] == ["hit", "hit"], path
        assert all(one["finish_reason"] for one in told if "explain" in one)
    body = {"prompt": prompts[0].replace("Rome", f"Lima {stream}"), "model": MODEL, "explain": True, "cache_salt": path}
    told = clean.post("/v1/completions", json=body).json()["choices"][0]["explain"]
    assert (told["reason"], told["parting"]["part"]) == ("prompt_differs", "prompt")
    assert told["parting"]["before"] == "Tell me about "


def test_chat_tells_it_with_the_last_chunk(clean):
    body = {"model": MODEL, "messages": [system("noon"), ASK], "max_tokens": 2, "stream": True, "explain": True}
    events = clean.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    told = [chunk for chunk in chunks if "explain" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == ["length"]
    assert told == chunks[-1:]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tell_it_in_anthropics_form(clean, stream):
    def send(system: str, said: str, **options) -> dict:
        turns = [{"role": "user", "content": [{"type": "text", "text": said}]}]
        body = {"max_tokens": 2, "system": system, "messages": turns, "stream": stream, "cache_salt": "messages"}
        answer = clean.post("/v1/messages", json=body | options)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()
        return json.loads(next(line for line in answer.text.splitlines() if line.startswith("data: "))[6:])["message"]

    first = send(f"It is noon. {HELP}", f"Where is Rome? {stream}", diagnostics={"previous_message_id": None})
    assert "diagnostics" not in first
    asked = {"diagnostics": {"previous_message_id": first["id"]}}
    told = send(f"It is late. {HELP}", f"Where is Rome? {stream}", **asked)
    missed = told["explain"]["missed_tokens"]
    assert told["diagnostics"]["cache_miss_reason"] == {"type": "system_changed", "cache_missed_input_tokens": missed}
    told = send(f"It is noon. {HELP}", f"Where is Rome? {stream}", tools=[{"name": "f", "input_schema": {}}], **asked)
    assert told["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
    told = send(f"It is noon. {HELP}", f"When was Rome? {stream}", **asked)
    assert told["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"
    assert (told["explain"]["parting"]["index"], told["explain"]["parting"]["here"][:4]) == (0, "n wa")
    assert send(f"It is noon. {HELP}", f"Where is Rome? {stream}", **asked)["diagnostics"] is None
    told = send(HELP, "Hi.", diagnostics={"previous_message_id": "msg_none"})
    assert told["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_responses_tell_it_in_openais_form(api, clean):
    options = {"model": MODEL, "max_output_tokens": 2, "extra_body": {"cache_salt": "responses"}}
    first = api.responses.create(instructions=f"It is noon. {HELP}", input="Where is Rome?", **options)
    options["prompt_cache_options"] = {"comparison_response_id": first.id}
    told = api.responses.create(instructions=f"It is late. {HELP}", input="Where is Rome?", **options)
    found = told.prompt_cache_diagnostics
    assert (found.type, found.reason, found.comparison_reusable_tokens) == ("cache_miss", "input_changed", 5)
    assert found.cache_missed_tokens == told.usage.input_tokens - told.usage.input_tokens_details.cached_tokens
    assert told.prompt_cache_options.comparison_response_id == first.id
    assert told.explain["reason"] == "system_differs"
    events = list(
        api.responses.create(instructions=f"It is noon. {HELP}", input="Where is Rome?", stream=True, **options)
    )
    assert events[-1].response.prompt_cache_diagnostics.type == "cache_hit"


@pytest.mark.parametrize("field", [{"explain": "yes"}, {"explain": 1}, {"comparison_response_id": ""},
                                   {"comparison_response_id": "x" * 257}, {"comparison_response_id": 7}])  # fmt: skip
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_bad_questions_are_refused(client, path, field):
    prompt = {"messages": [ASK]} if "chat" in path else {"text": "x"} if path == "/generate" else {"prompt": "x"}
    model = {} if path == "/generate" else {"model": MODEL}
    answer = client.post(path, json={**model, **prompt, **field})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))


def test_no_key_learns_of_anothers_prompts(guarded):
    def ask(key, text, **options):
        headers = {"Authorization": f"Bearer {key}-secret-key"}
        body = {"text": text, "sampling_params": {"max_new_tokens": 1}, "explain": True, **options}
        answer = httpx.post(f"{guarded.url}/generate", json=body, headers=headers, timeout=60)
        return answer.json()["meta_info"]["explain"]

    secret = f"Tell me about the secret of Alice. {HELP}"
    assert ask("alice", secret, rid="mine")["reason"] == "never_here"
    probe = secret.replace("Alice", "Berta")
    assert ask("alice", probe)["reason"] == "prompt_differs"
    other = probe.replace("Berta", "Carla")
    told = ask("boss", other)
    assert (told["reason"], told["cached_tokens"], told["parting"]) == ("never_here", 0, None)
    told = ask("boss", other.replace("Carla", "Doris"), comparison_response_id="mine")
    assert (told["reason"], told["parting"]) == ("comparison_not_found", None)


def test_what_is_reused_otherwise_than_by_prefix(clean):
    modules = ('<module name="rome">Rome is old.</module>', '<module name="oslo">Oslo is cold.</module>')
    pml = f'<schema name="trip">You plan.{"".join(modules)}</schema>'
    clean.post("/v1/schemas", json={"pml": pml}).raise_for_status()
    try:
        for names, missing in (("<rome/>", "rome"), ("<rome/><oslo/>", "oslo"), ("<rome/>", None)):
            body = {"pml": f'<prompt schema="trip">{names} Go.</prompt>', "explain": True}
            answer = clean.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 1}})
            told = answer.json()["meta_info"]["explain"]
            assert told["reason"] == ("entries_missing" if missing else "hit")
            assert missing is None or missing in told["message"]
            assert missing != "oslo" or "rome" not in told["message"]
    finally:
        clean.delete("/v1/schemas/trip").raise_for_status()


@pytest.mark.parametrize(("cached", "reason"), [(0, "entries_missing"), (64, "hit")])
def test_the_prefix_of_a_diffusion_model(cached, reason):
    assert _not_by_prefix(shared(encoded_tokens=64), cached)[0] == reason


def test_a_diffusion_model_s_request_that_shares_no_prefix():
    assert _not_by_prefix(shared(unshared="too_short"), 0) == ("too_short", "the shared prefix fills no page")
    assert _not_by_prefix(shared(unshared=None), 0) is None, "it ended before its admission"


def shared(encoded_tokens=0, **fields):
    counts = {"refreshes": 0, "prefix_ratio": 0.5, "denoise_steps": 1}
    return SharedPrefixReport(shallow_depth=1, encoded_tokens=encoded_tokens, **counts, **fields)

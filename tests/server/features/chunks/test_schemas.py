"""Schemas and prompts over HTTP: what is registered, what requests with modules give, and errors."""

import json

import pytest

GREEDY = {"max_new_tokens": 8, "temperature": 0}
CITIES = """<schema name="cities">You plan trips to cities, and you answer in one short sentence.
<module name="plan">Plan a trip of <parameter name="days" length="4"/> days.
<union><module name="miami">Miami has long beaches.</module><module name="rome">Rome is old.</module></union></module>
<module name="food">Eat well.</module></schema>"""
TALK = """<schema name="talk"><system>You are kind.</system>
<user>Read<module name="a"> the first letter, alpha.</module><module name="b"> the second letter, beta.</module></user>
<assistant>I have read both.</assistant></schema>"""
PROMPT = '<prompt schema="cities"><plan days="3"><miami/></plan><food/> The best beach is</prompt>'
PARTS = [{"type": "module", "module": {"path": "/a"}}, {"type": "module", "module": {"path": "b"}}]


@pytest.fixture
def add(client):
    """Registers schemas, and forgets them at the end."""
    names = []

    def add(pml: str, **fields) -> dict:
        response = client.post("/v1/schemas", json={"pml": pml, **fields})
        assert response.status_code == 200, response.text
        names.append(response.json()["id"])
        return response.json()

    yield add
    for name in set(names):
        assert client.delete(f"/v1/schemas/{name}").status_code == 200


def generate(client, pml: str = PROMPT, **fields) -> dict:
    response = client.post("/generate", json={"pml": pml, "sampling_params": GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_register_list_and_delete(client, add):
    made = add(CITIES, ttl_s=60)
    assert (made["id"], made["mode"], made["pins"]) == ("cities", "independent", [])
    assert [module["path"] for module in made["modules"]] == ["/", "/plan", "/plan/miami", "/plan/rome", "/food"]
    again = add(CITIES)
    assert 0 < made.pop("expires_in_s") <= 60
    assert again.pop("expires_in_s") is None
    assert again == made
    add(TALK)
    listed = client.get("/v1/schemas").json()["data"]
    assert [one["id"] for one in listed] == ["cities", "talk"]
    assert (listed[0]["length"], "modules" in listed[0]) == (made["length"], False)
    one = client.get("/v1/schemas/cities").json()
    assert (one["modules"], set(one["cached_tokens"].values())) == (made["modules"], {0})
    for other in ({"pml": CITIES.replace("Eat", "Drink")}, {"pml": CITIES, "mode": "scaffold"}):
        refused = client.post("/v1/schemas", json=other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "schema_exists")


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"pml": "<schema name='x'>\n<module/></schema>"}, "/, line 2: <module> needs the attribute 'name'", "pml"),
        ({"pml": CITIES, "scaffolds": [["/"]]}, "scaffolds need the mode scaffold", "pml"),
        ({"pml": CITIES, "mode": "all"}, "mode: ", "mode"),
        ({"pml": CITIES, "mode": "scaffold", "scaffolds": [["/x"]]}, "/x: a scaffold names a module", "pml"),
        ({"pml": CITIES, "ttl_s": -1}, "ttl_s: ", "ttl_s"),
        ({"pml": "<schema name='x'>" + "word " * 9000 + "</schema>", "encode": True}, "reaches position", "pml"),
        ({}, "pml: Field required", "pml"),
    ],
)
def test_a_schema_that_cannot_be_served_is_not_registered(client, body, words, param):
    response = client.post("/v1/schemas", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert client.get("/v1/schemas").json()["data"] == []


def test_pinned_modules_are_computed_once_and_read_by_all_ways_to_ask(client, add):
    made = add(CITIES, pin=True)
    assert {(pin["id"], pin["name"]) for pin in client.get("/cache/pins").json()["pins"]} == {
        (pin, "cities") for pin in made["pins"]
    }
    client.post("/flush_cache")
    whole = generate(client)
    meta = whole["meta_info"]
    reuse = meta["reuse"]
    assert (reuse["strategy"], reuse["modules"]) == ("modules", ["/", "/plan", "/plan/miami", "/food"])
    assert reuse["computed_modules"] == []
    assert reuse["reused_tokens"] == meta["cached_tokens"] == meta["prompt_tokens"] - reuse["computed_tokens"]
    assert reuse["computed_tokens"] == 5  # the argument, and the text behind the modules
    batch = generate(client, [PROMPT, PROMPT.replace("miami", "rome")])
    assert batch[0]["text"] == whole["text"]
    assert [sorted(one["meta_info"]["reuse"]["modules"])[-1] for one in batch] == ["/plan/miami", "/plan/rome"]
    response = client.post("/generate", json={"pml": PROMPT, "sampling_params": GREEDY, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["reuse"]["modules"] == reuse["modules"]


def test_a_schema_says_which_modules_are_cached(client, add):
    """More modules than the engine looks up at once; twins are one entry; a scaffold is one of its own."""
    holes = {"twin": "<param name='p' len='1'/><param name='q' len='2'/>", "other": "<param name='p' len='3'/>"}
    twins = "".join(f"<module name='{name}'>{hole} The same text.</module>" for name, hole in holes.items())
    many = "".join(f"<module name='m{number}'> Number {number}.</module>" for number in range(70))
    text = "The text of a schema, which has some more tokens than one page of the cache holds."
    made = add(f"<schema name='many'>{text}<union>{twins}</union>{many}</schema>", mode="scaffold",
               scaffolds=[["/m1", "/m2"]])  # fmt: skip
    tokens = {module["path"]: module["tokens"] for module in made["modules"]}
    whole = tokens | {"/m1 + /m2": tokens["/m1"] + tokens["/m2"]}

    def cached(query: str = "") -> dict:
        return client.get(f"/v1/schemas/many{query}").json()["cached_tokens"]

    assert cached() == dict.fromkeys(whole, 0)
    generate(client, "<prompt schema='many'><other/><m3/><m69/> And so on.</prompt>")
    used = ("/", "/twin", "/other", "/m3", "/m69")
    assert cached() == {path: tokens * (path in used) for path, tokens in whole.items()}
    assert cached("?cache_salt=mine") == dict.fromkeys(whole, 0)
    client.post("/flush_cache")
    assert cached() == dict.fromkeys(whole, 0)
    assert client.get("/v1/schemas/many?cache_scope=all").status_code == 400


def test_modules_of_a_nested_schema_see_the_texts_around_them(client, add):
    """The same positions and the same cost; a module that is alone in its schema's text is the plain text."""
    made = add(CITIES, mode="nested", encode=True)
    assert made["mode"] == "nested"
    reuse = generate(client)["meta_info"]["reuse"]
    assert (reuse["modules"], reuse["computed_modules"]) == (["/", "/plan", "/plan/miami", "/food"], [])
    assert reuse["computed_tokens"] == 5
    add("<schema name='one'>The sea is<module name='m'> warm in summer, and it</module></schema>", mode="nested")
    text = "The sea is warm in summer, and it is cold"
    plain = client.post("/generate", json={"text": text, "sampling_params": GREEDY}).json()["text"]
    assert generate(client, "<prompt schema='one'><m/> is cold</prompt>")["text"] == plain


def test_modules_are_repaired_as_the_request_asks_or_the_schema(client, add):
    """With all rows, the answer is that of the plain text."""
    add("<schema name='sea' repair='a3' ratio='1'>The sea is<module name='m'> warm in summer, and it</module></schema>")
    text, prompt = "The sea is warm in summer, and it is cold", "<prompt schema='sea'><m/> is cold</prompt>"
    plain = client.post("/generate", json={"text": text, "sampling_params": GREEDY}).json()["text"]
    for fields in ({}, {"reuse": {"method": "cacheblend", "ratio": 1}}):
        answer = generate(client, prompt, **fields)
        reuse = answer["meta_info"]["reuse"]
        assert (answer["text"], reuse["exact"], reuse["ratio"]) == (plain, True, 1)
        assert reuse["method"] == fields.get("reuse", {"method": "a3"})["method"]
    apart = generate(client, prompt, reuse={"method": "none"})["meta_info"]["reuse"]
    assert (apart["exact"], apart["exact_modules"], "method" in apart) == (False, True, False)
    assert "auto" in generate(client, prompt, reuse={"method": "auto"})["meta_info"]["reuse"]
    refused = client.post("/generate", json={"pml": prompt, "reuse": {"method": "a3", "chunk_tokens": 64}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reuse.chunk_tokens")


def test_what_ends_an_encoding_leaves_neither_schema_nor_pins(client, server):
    def abort():
        client.post("/abort_request", json={"abort_all": True})

    def delete():
        assert client.delete("/v1/schemas/brief").status_code == 200
        client.post("/resume")

    for n, (end, code) in enumerate([(abort, "aborted"), (delete, "schema_deleted")]):
        pml = f"<schema name='brief'>{f'A brief text {n}. ' * 8}</schema>"
        with server.waiting("/v1/schemas", {"pml": pml, "pin": True}) as answer:
            end()
            response = answer.result()
        assert (response.status_code, response.json()["error"]["code"]) == (409, code)
        assert client.get("/v1/schemas").json()["data"] == client.get("/cache/pins").json()["pins"] == []


@pytest.mark.parametrize(
    ("pml", "status", "words"),
    [
        (PROMPT.replace("miami", "oslo"), 400, "/plan/oslo, line 1: there is no module 'oslo'"),
        (PROMPT.replace("cities", "towns"), 404, "there is no schema 'towns'"),
        (PROMPT[:-4], 400, "this is not XML"),
        (PROMPT.replace("best", "best " * 9000), 400, "this model's maximum context length is 8192 tokens"),
    ],
)
def test_a_prompt_that_does_not_fit(client, add, pml, status, words):
    add(CITIES)
    response = client.post("/generate", json={"pml": [PROMPT, pml], "sampling_params": GREEDY})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, "pml" if status == 400 else "schema")
    assert words in error["message"]


def test_modules_and_log_probabilities_of_the_prompt_exclude_each_other(client, add):
    add(CITIES)
    response = client.post("/generate", json={"pml": PROMPT, "return_logprob": True, "logprob_start_len": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprob_start_len")
    response = client.post("/generate", json={"pml": PROMPT, "text": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text")


# -- chat


def chat(api, messages: list, **fields):
    extra = {"schema": "talk", **fields.pop("extra", {})}
    return api.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=8, temperature=0, extra_body=extra, **fields
    )


def test_a_conversation_that_imports_all_modules_of_a_scaffold_is_the_plain_conversation(api, client, add):
    add(TALK, mode="scaffold")
    question = {"type": "text", "text": "Which is the second?"}
    answer = chat(api, [{"role": "user", "content": [*PARTS, question]}])
    spoken = [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": "Read the first letter, alpha. the second letter, beta."},
        {"role": "assistant", "content": "I have read both."},
        {"role": "user", "content": "Which is the second?"},
    ]
    plain = api.chat.completions.create(model="smollm2", messages=spoken, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert answer.reuse["modules"] == ["/ + /a + /b"]
    chunks = list(chat(api, [{"role": "user", "content": [*PARTS, question]}], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    assert chunks[-1].reuse["reused_tokens"] > 0
    assert not any(hasattr(chunk, "reuse") for chunk in chunks[:-1])


@pytest.mark.parametrize("extra", [{}, {"reuse": {"method": "prophetkv", "ratio": 0.5}}])
def test_later_turns_read_the_earlier_ones(api, client, add, extra):
    add(TALK)
    first = [{"role": "user", "content": PARTS[:1]}, {"role": "user", "content": "Which is it?"}]
    answer = chat(api, first, extra=extra)
    assert answer.reuse["modules"] == ["/", "/a"]
    said = answer.choices[0].message.content
    turns = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    second = chat(api, turns, extra=extra)
    assert second.reuse.get("chosen_before", False) == bool(extra)
    assert second.reuse["reused_tokens"] >= answer.usage.prompt_tokens // 16 * 16


def test_tools_follow_the_schema(api, client, add):
    add(TALK)
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    answer = api.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Weather?"}], tools=[tool], tool_choice="required",
        extra_body={"schema": "talk"}, max_tokens=64,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("fields", "content", "status", "param"),
    [
        ({"schema": "nobody"}, "x", 404, "schema"),
        ({"schema": "cities"}, "x", 400, "schema"),
        ({}, PARTS, 400, "schema"),
        ({"schema": "talk"}, [{"type": "module", "module": {"path": "c"}}], 400, "messages"),
        ({"schema": "talk"}, [*PARTS, *PARTS], 400, "messages"),
        ({"schema": "talk"}, [{"type": "module", "module": {"path": ""}}], 400, "messages"),
        ({"schema": "talk"}, [{"type": "module", "module": {"path": "a", "args": {"x": "y"}}}], 400, "messages"),
        ({"schema": "talk"}, [{"type": "module", "module": {}}], 400, "messages.0.content.0.module.path"),
        ({"schema": "talk"}, [{"type": "module", "module": {"path": 1}}], 400, "messages.0.content.0.module.path"),
    ],
)  # fmt: skip
def test_a_conversation_that_does_not_fit(client, add, fields, content, status, param):
    add(TALK)
    add(CITIES)
    body = {"model": "smollm2", "messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)

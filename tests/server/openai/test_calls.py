"""Calls of tools: their readers and their grammars, alone."""

import json
import time

import pytest
import tokenizers

from runtime.errors import InvalidRequest
from runtime.features.grammars.compiler import GrammarCompiler
from runtime.features.grammars.grammar import Grammar
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from server.openai.call_grammars import behind_reasoning, calls_or_format, lazy_calls, schema_of_call
from server.openai.dialects.json_objects import WHOLE
from server.openai.dialects.parameters import Parameters
from server.openai.harmony import FINALS
from server.openai.reader import CallReader, text_input
from server.openai.tools import Tool
from tests.server.openai.test_tools import STOP, WEATHER

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
BARE = '{\n  "name": "get_weather", "arguments": {"city": "Rom"}}'
TOOLS = {"get_weather": Parameters({}), "stop": Parameters({})}
EXPECTED = ("get_weather", {"city": "Rom"})


def read(reader: CallReader, text: str, size: int) -> tuple[str, list]:
    shown, calls = "", []
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    for i, piece in enumerate(pieces):
        new, found = reader.push(piece, last=i == len(pieces) - 1)
        shown += new
        calls += [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]
    return shown, calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (CALL, "", [EXPECTED]),
        (f"I look.\n{CALL}\n{CALL}", "I look.", [EXPECTED, EXPECTED]),
        (f"{CALL} and so on", " and so on", [EXPECTED]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>{broken</tool_call>!", "<tool_call>{broken</tool_call>!", []),
        ('<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
        ('<tool_call>{"name": "stop"}', "", [("stop", {})]),
        ("<tool_call>" + "[" * 2000, "<tool_call>" + "[" * 2000, []),
        (f"So:\n```json\n{BARE}\n```\nand so on", "So:and so on", [EXPECTED]),
        (f"```json\n{BARE}\n{BARE}", "", [EXPECTED] * 2),
        (f"{BARE}\n\n{BARE}\n{BARE}", "", [EXPECTED] * 3),
        ("```json\n[1]\n``` ```js", "```json\n[1]\n``` ```js", []),
        (f"\n{BARE} ", "", [EXPECTED]),
        (f"{BARE} is it", f"{BARE} is it", []),
        ("  ", "  ", []),
        ('{"name": "x"}', '{"name": "x"}', []),
        *(
            (f"<tool_call>{odd}</tool_call>", f"<tool_call>{odd}</tool_call>", [])
            for odd in (
                '{"name": []}',
                '{"name": "stop", "arguments": NaN}',
            )
        ),
    ],
)
def test_calls_between_tags(text, shown, calls, size):
    assert read(CallReader(TOOLS), text, size) == (shown, calls)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rom"}}]', "", [EXPECTED]),
        ('{"name": "get_weather", "parameters": {"city": "Rom"}}', "", [EXPECTED]),
        ('<|python_tag|>{"name": "stop", "parameters": {}}', "", [("stop", {})]),
        ("[see below]", "[see below]", []),
        (" It rains.", " It rains.", []),
        ("", "", []),
    ],
)
def test_texts_that_are_calls(text, shown, calls, size):
    assert read(CallReader(TOOLS, dialect=WHOLE), text, size) == (shown, calls)


def test_one_call_at_most_where_that_is_wanted():
    assert read(CallReader(TOOLS, single=True), CALL + CALL, 7)[1] == [EXPECTED]


def test_without_tools_nothing_is_held_back():
    assert CallReader({}).push("<tool_call>", last=False) == ("<tool_call>", [])


TAGS = ["<tool_call>", "</tool_call>", "</think>", "<|python_tag|>", "<|channel|>", "<|message|>"]


@pytest.fixture(scope="module", params=["", "tags are tokens", "tags are special tokens"])
def vocabulary(request, tokenizer):
    fast = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    (fast.add_special_tokens if "special" in request.param else fast.add_tokens)(TAGS if request.param else [])
    return Tokenizer(fast, {}, None)


@pytest.fixture(scope="module")
def written(vocabulary):
    """Writes a text under a grammar: the part that may be written, and whether the output ends with it."""
    tokenizer, compiler = vocabulary, GrammarCompiler(vocabulary.to_json, 49152 + len(TAGS), [2], timeout_s=300)

    def write(sampling: SamplingParams, text: str) -> tuple[str, bool]:
        compiler.start("a", sampling)
        while not (done := dict(compiler.take())):
            time.sleep(0.01)
        grammar = done["a"]
        assert isinstance(grammar, Grammar), grammar
        ids: list[int] = []
        for token in tokenizer.encode(text, add_special_tokens=False):
            allowed = grammar.allowed()
            if (allowed is not None and not allowed[token // 8] >> token % 8 & 1) or not grammar.accept(token):
                break
            ids.append(token)
        return tokenizer.decode(ids, skip_special_tokens=False), grammar.complete

    return write


def check_written(written, sampling, text, stops, ends):
    """`stops`: in `text`, the first token that may not be written begins somewhere in it; empty: all may be."""
    found, complete = written(sampling, text)
    assert complete == ends
    if stops:
        assert len(text[: text.rindex(stops)]) <= len(found) < len(text)
    else:
        assert found == text


WELL = '{"name": "get_weather", "arguments": {"city": "Rom", "unit": "C"}}'
LLAMA = WELL.replace("arguments", "parameters")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("tagged", "text", "stops", "ends"),
    [
        (True, f"I look.<tool_call>\n{WELL}\n</tool_call> 5 < 6 <tool_call>{WELL}</tool_call>", "", False),
        (True, f"x {LLAMA} <tool {WELL[:9]} </tool_call> {{", "", False),
        (True, '<tool_call>\n{"name": "nobody', "nob", False),
        (True, '<tool_call>\n{"name": "stop", "arguments": 3', " 3", False),
        (True, 'a <tool_call>\n{"name": "stop", "arguments": {}}\n and', " and", False),
        (True, f"{WELL}\n{WELL}", "", False),
        (True, f"```json\n{WELL}\n```", "", True),
        (True, '```json\n{\n  "name": "stop",\n  "colour', "col", False),
        (True, '{"name": "nobody"} <tool_call>x', "x", False),
        (True, "```json\n[1]\n``` <tool_call>x", "x", False),
        (False, LLAMA, "", True),
        (False, f"[{WELL}, {WELL}]", "", True),
        (False, f" [TOOL_CALLS] [{WELL}]", "", True),
        (False, '{\n  "name": "stop",\n    "parameters": {}}', "", True),
        (False, f"<|python_tag|>{LLAMA} and", " and", True),
        (False, '{"name": "stop", "colour', "col", False),
        (False, f"It is {LLAMA}, {WELL} <tool_call> x", "", False),
        (False, '{"name": "nobody", "colour": 3} x', "", False),
        (False, "[TOOL_CALLS] none", " none", False),
    ],
)
def test_a_call_once_begun_is_well_formed(vocabulary, written, which, tagged, text, stops, ends):
    tools = [Tool.model_validate(WEATHER), Tool.model_validate(STOP)]
    sampling = lazy_calls(vocabulary, SamplingParams(), tools, tagged)[which]
    check_written(written, sampling, text, stops, ends)


def test_a_call_follows_its_schema_as_far_as_a_grammar_can(vocabulary, written):
    odd = {"x": {"type": "string", "format": "weird", "description": "a ::= b"}, "y": {"enum": [1, {"title": "t"}]}}
    described = {"name": "f", "parameters": {"type": "object", "title": "T", "properties": {**odd, "title": {}}}}
    tools = [Tool.model_validate({"type": "function", "function": described})]
    strict, loose = lazy_calls(vocabulary, SamplingParams(), tools, True)
    start = '<tool_call>{"name": "f", "arguments": {"'
    assert "weird" in strict.grammar
    assert "::=" not in strict.grammar
    for text, sampling, is_taken in [
        ('x": "a", "title": 5}}</tool_call>', strict, True),
        ('y": {"title": "t"}}}</tool_call>', strict, True),
        ('y": 2}}</tool_call>', strict, False),
        ('y": 2}}</tool_call>', loose, True),
    ]:
        assert (written(sampling, start + text)[0] == start + text) == is_taken
    long = {**described, "parameters": {"type": "object", "properties": {"x": {"enum": ["a" * 70_000]}}}}
    tools = [Tool.model_validate({"type": "function", "function": long})]
    strict, loose = lazy_calls(vocabulary, SamplingParams(), tools, True)
    assert strict == loose


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("format", "text", "stops", "ends"),
    [
        ({"json_schema": SCHEMA}, 'Hm, {"b": 2}.</think>\n\n{"a": 1}', "", True),
        ({"json_schema": SCHEMA}, 'Hm.</think>{"a": 1} and', " and", True),
        ({"json_schema": SCHEMA}, "Hm.</think>No", "No", False),
        ({"regex": "a/[0-9]{2}"}, "Hm.</think>a/12", "", True),
        ({"regex": r"a\/[0-9]{2}"}, "a/3</think>a/1x", "x", False),
        ({"json_schema": SCHEMA}, '<|channel|>a<|message|>Hm, {<|channel|>final<|message|>{"b', "b", False),
        ({"json_schema": SCHEMA}, '<|channel|>final <|constrain|>json<|message|>{"a": 1}', "", True),
    ],
)
def test_a_format_holds_behind_the_reasoning(vocabulary, written, format, text, stops, ends):
    sampling = behind_reasoning(vocabulary, SamplingParams(**format), ["</think>", *FINALS])
    check_written(written, sampling, text, stops, ends)
    grammar = SamplingParams(grammar='start: "a"')
    assert behind_reasoning(vocabulary, grammar, ["</think>"]) is grammar


def test_an_answer_is_calls_or_has_a_format(vocabulary, written):
    grammar = calls_or_format(vocabulary, [Tool.model_validate(STOP)], SCHEMA, True)
    one = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for well, more in ((f"{one}\n{one}", " no"), ('{"a": 1}', " no"), (one, '{"a": 1}'), ('{"a": 1}', one)):
        assert written(SamplingParams(grammar=grammar), well + more)[0].strip() == well


def test_the_input_of_a_custom_tool_that_is_cut_off():
    for arguments, text in (
        ('{"input": "a\\n', "a\n"),
        ('{\n"in', ""),
        ('{"input": "b"}', "b"),
        ("no", "no"),
        ("[1]", "[1]"),
    ):
        assert text_input(arguments) == text


def test_a_forced_call_needs_no_keyword_that_no_grammar_has(written):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    text = schema_of_call([Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})])
    wanted = '{"name": "f", "arguments": {"a": [1, 1]}}'
    assert written(SamplingParams(json_schema=text), wanted) == (wanted, True)


def test_a_forced_call_of_a_tool_that_refers_to_itself(written):
    schema = {
        "type": "object",
        "properties": {"label": {"type": "string"}, "child": {"$ref": "#"}},
        "required": ["label"],
        "additionalProperties": False,
    }
    text = schema_of_call([Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})])
    wanted = '{"name": "f", "arguments": {"label": "a", "child": {"label": "b"}}}'
    assert written(SamplingParams(json_schema=text), wanted) == (wanted, True)
    assert not written(SamplingParams(json_schema=text), wanted.replace('{"label": "b"}', '{"name": "f"}'))[1]


def test_a_required_argument_that_is_not_listed(written):
    schema = {"type": "object", "properties": {"body": {"type": "string"}}, "required": ["title", "body"]}
    text = schema_of_call([Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})])
    wanted = '{"name": "f", "arguments": {"body": "a", "title": 3}}'
    assert written(SamplingParams(json_schema=text), wanted) == (wanted, True)


@pytest.mark.parametrize("schema", ["nonsense", "[1]", '"x"', '{"a": NaN}'])
def test_a_schema_that_is_no_object_is_refused(tokenizer, schema):
    for make in (
        lambda: behind_reasoning(tokenizer, SamplingParams(json_schema=schema), ["</think>"]),
        lambda: calls_or_format(tokenizer, [Tool.model_validate(STOP)], schema, True),
    ):
        with pytest.raises(InvalidRequest, match="must be the text of a JSON object"):
            make()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "stop", "arguments": {"why": "it ra', '{"why": "it ra'),
        ('{"name":"stop","arguments":{}', "{}"),
        ('{"name": "stop", "arguments": ', ""),
        ('{"name": "stop"', None),
        ('{"name": "unknown", "arguments": {"a', None),
        ("It rains", None),
    ],
)
def test_a_call_that_is_cut_off(text, arguments):
    for reader, before in ((CallReader(TOOLS, forced=True), ""), (CallReader(TOOLS), "<tool_call>\n")):
        shown, calls = reader.push(before + text, True, True)
        if arguments is None:
            assert (shown, calls) == (before + text, [])
        else:
            assert (shown, calls[0]["function"]) == ("", {"name": "stop", "arguments": arguments})
    assert CallReader(TOOLS, forced=True).push(text, True)[1] == [], "a text that the model has ended is no call"

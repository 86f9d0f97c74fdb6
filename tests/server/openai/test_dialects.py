"""How models write reasoning and calls: what a reader finds in their texts, however they arrive."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.features.chunks.documents.prompt import Document, Segments
from runtime.frontend.output import Encoded
from runtime.models.tokenizer import Tokenizer
from server.openai.chat import reader_of
from server.openai.dialects.choosing import dialect_of
from server.openai.dialects.dialect import Dialect
from server.openai.dialects.json_objects import WHOLE
from server.openai.dialects.parameters import Parameters
from server.openai.dialects.tagged import TAGGED
from server.openai.harmony import HarmonyReader
from server.openai.reader import AnswerParts, AnswerReader, CallReader
from server.openai.types import ChatRequest

TEXT, NULLABLE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
PROPERTIES = {"q": TEXT, "most": {"type": "integer"}, "in": {"type": "array"}, "note": NULLABLE}
TOOLS = {"find": Parameters({"properties": PROPERTIES}), "stop": Parameters({}), "look-it-up": Parameters({})}


class Named:
    """A tokenizer with a chat template that has a text, or with a token in its vocabulary."""

    def __init__(self, sign: str, token: str = ""):
        self.chat_template = f"{{% if tools %}}{sign}{{% endif %}}"
        self.added_texts = (token,)


def dialect(sign: str, token: str = "") -> Dialect:
    return dialect_of(Named(sign, token))  # type: ignore[arg-type]


def read(dialect: Dialect, text: str, size: int, state="start", cut=False) -> tuple[str, str, list]:
    calls = CallReader(TOOLS, dialect=dialect)
    reader = HarmonyReader(calls) if dialect.is_harmony else AnswerReader(calls, state)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    said = [reader.push(one, i == len(pieces) - 1, cut and i == len(pieces) - 1) for i, one in enumerate(pieces)]
    thought, shown = ("".join(parts) for parts in ([one.thought for one in said], [one.text for one in said]))
    found = [call for one in said for call in one.calls]
    assert [call["index"] for call in found] == [*range(reader.num_calls)]
    functions = [call["function"] for call in found]
    return thought, shown, [(one["name"], json.loads(one["arguments"])) for one in functions]


FIND = ("find", {"q": "a <b> 3", "most": 3, "in": ["x", {"y": None}], "note": "null and void"})
XML = (
    "<function=find>\n<parameter=q>\na <b> 3\n</parameter>\n<parameter=most>\n3\n</parameter>\n"
    '<parameter=in>\n["x", {"y": null}]\n</parameter>\n<parameter=note>\nnull and void\n</parameter>\n</function>'
)
INLINE = XML.replace(">\n", ">").replace("\n<", "<")
MINIMAX = (
    '<invoke name="find">\n<parameter name="q">a <b> 3</parameter>\n<parameter name="most">3</parameter>\n'
    '<parameter name="in">["x", {"y": null}]</parameter>\n<parameter name="note">null and void</parameter>\n</invoke>'
)
GLM = (
    "find\n<arg_key>q</arg_key>\n<arg_value>a <b> 3</arg_value>\n<arg_key>most</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>in</arg_key>\n<arg_value>["x", {"y": null}]</arg_value>\n'
    "<arg_key>note</arg_key>\n<arg_value>null and void</arg_value>\n"
)
GIVEN = json.dumps(FIND[1])
GEMMA = 'find{in:[<|"|>x<|"|>,{y:null}],most:3,note:<|"|>null and void<|"|>,q:<|"|>a <b> 3<|"|>}'
DEEP = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
CASES = [
    ("<function=", f"Look.\n<tool_call>\n{XML}\n</tool_call>", ("", "Look.", [FIND])),
    ("<function=", f"<think>\nHm.\n</think>\n\n<tool_call>\n{XML}\n</tool_call>", ("Hm.\n", "", [FIND])),
    ("<function=", f"{XML}\n</tool_call>", ("", "", [FIND])),
    ("<function=", f"<tool_call>{XML}</tool_call>\n<tool_call>{XML}</tool_call>", ("", "", [FIND, FIND])),
    ("<function=", "<tool_call><function=rob>\n</function></tool_call>", None),
    ("<function=", f'<tool_call>{{"name": "find", "arguments": {GIVEN}}}</tool_call>', ("", "", [FIND])),
    ("<function=", f"<function=find>{GIVEN}</function>", ("", "", [FIND])),
    ("<TOOLCALL>", f'<TOOLCALL>[{{"name": "find", "arguments": {GIVEN}}}]</TOOLCALL>', ("", "", [FIND])),
    ("<arg_key>", f"<think></think>\n<tool_call>{GLM}</tool_call>", ("", "", [FIND])),
    (
        "<function=",
        '<tool_call>{"name": "find", "arguments": {"q": "<function=stop>"}}</tool_call>',
        ("", "", [("find", {"q": "<function=stop>"})]),
    ),
    ("[TOOL_CALLS]", '[TOOL_CALLS]{"name": "stop"}[TOOL_CALLS]{"name": "stop"}', ("", "", [("stop", {})] * 2)),
    ("[TOOL_CALLS]", '[TOOL_CALLS]{"name": "stop"}[TOOL_CALLS]no', None),
    *(  # what has no names for all of its arguments, or is no call
        ("<|tool_call_start|>", f"<|tool_call_start|>[{call}]<|tool_call_end|>", None)
        for call in (
            "find('a')",
            "find('a', q='b')",
            "find(*['a'])",
            "find(**{'q': 'a'})",
            "find(q='a', **{'most': 3})",
            "find",
            "find(q=a)",
            "find(q='a'",
            "find(q='a').stop()",
            "rob()",
            "stop(), rob()",
            "stop() + 1",
        )
    ),
    ("<|tool_call_start|>", "<|tool_call_start|>[find(most=1e999)]<|tool_call_end|>", None),
    (
        "<TOOLCALL>",
        '<TOOLCALL>[{"name": "find", "arguments": {"q": "\\"</TOOLCALL>\\\\"}}]</TOOLCALL>So.',
        ("", "So.", [("find", {"q": '"</TOOLCALL>\\'})]),
    ),
    ("<TOOLCALL>", '<TOOLCALL>{"name": "find}</TOOLCALL>So.', None),
    ("<TOOLCALL>", '<TOOLCALL>{"name": "stop"}</TOOLCALL>\n\nSo.\n\nNow.', ("", "So.\n\nNow.", [("stop", {})])),
    (
        "<function=",
        "<tool_call><function=find><parameter=q>\na </function> b </tool_call> </parameter> c\n</parameter>\n"
        "<parameter=note>\nNone\n</parameter></function>\n</tool_call>",
        ("", "", [("find", {"q": "a </function> b </tool_call> </parameter> c", "note": None})]),
    ),
    (
        "<minimax:tool_call>",
        '<minimax:tool_call><invoke name="find"><parameter name="q">\n</invoke>\n</parameter></invoke>'
        "</minimax:tool_call>",
        ("", "", [("find", {"q": "\n</invoke>\n"})]),
    ),
    (
        "<|tool_call_start|>",
        """<|tool_call_start|>[find(q='5" <')]<|tool_call_end|><|tool_call_start|>[find(q="\\ud83d\\ude00")]""",
        ("", "", [("find", {"q": '5" <'}), ("find", {"q": "\U0001f600"})]),
    ),
    ("<|tool_call_start|>", '<|tool_call_start|>[find(q="\\ud83d")]<|tool_call_end|>', None),
    (
        "<|tool_call_start|>",
        "<|tool_call_start|>[look-it-up(a=1)]<|tool_call_end|>",
        ("", "", [("look-it-up", {"a": 1})]),
    ),
    ("<|tool_call>", "<|tool_call>call:find{note:None}<tool_call|>", ("", "", [("find", {"note": None})])),
    (
        "<arg_key>",
        "<tool_call>find<arg_key>q</arg_key><arg_value>a\n</arg_value></tool_call>",
        ("", "", [("find", {"q": "a\n"})]),
    ),
    ("<arg_key>", "<tool_call>stop</tool_call>", ("", "", [("stop", {})])),
    ("<arg_key>", "<tool_call>stop it</tool_call>", None),
    ("<minimax:tool_call>", f"<minimax:tool_call>\n{MINIMAX}\n</minimax:tool_call>", ("", "", [FIND])),
    (
        "<seed:tool_call>",
        f"<seed:think>Hm.</seed:think>\n<seed:tool_call>\n{INLINE}\n</seed:tool_call>",
        ("Hm.", "", [FIND]),
    ),
    (
        "<|tool_call_start|>",
        '<|tool_call_start|>[find(q="a", most=3, note=null), stop()]<|tool_call_end|>Now.',
        ("", "Now.", [("find", {"q": "a", "most": 3, "note": None}), ("stop", {})]),
    ),
    ("<|tool_call_start|>", "<|tool_call_start|>[find(q=open('x'))]<|tool_call_end|>", None),
    ("[TOOL_CALLS]", f"[THINK]Hm.[/THINK]Look.[TOOL_CALLS]find[ARGS]{GIVEN}", ("Hm.", "Look.", [FIND])),
    (
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]find[CALL_ID]123456789[ARGS]{GIVEN}[TOOL_CALLS]stop[ARGS]{{}}",
        ("", "", [FIND, ("stop", {})]),
    ),
    ("[TOOL_CALLS]", f'[TOOL_CALLS] [{{"name": "find", "arguments": {GIVEN}}}]', ("", "", [FIND])),
    (
        "<｜tool▁calls▁begin｜>",
        "Hm.</think>Look.<｜tool▁calls▁begin｜>"
        + DEEP.format(f"find<｜tool▁sep｜>{GIVEN}")
        + DEEP.format("function<｜tool▁sep｜>stop\n```json\n{}\n```")
        + "<｜tool▁calls▁end｜>",
        ("Hm.", "Look.", [FIND, ("stop", {})]),
    ),
    (
        "<|tool_call>",
        f"<|channel>thought\nHm.\n<channel|><|tool_call>call:{GEMMA}<tool_call|><|tool_call>call:stop{{}}<tool_call|>",
        ("Hm.\n", "", [FIND, ("stop", {})]),
    ),
    (
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm, < or <|.<|end|><|start|>assistant<|channel|>final<|message|>An oak.",
        ("Hm, < or <|.", "An oak.", []),
    ),
    (
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        '<|start|>assistant<|channel|>final <|constrain|>json<|message|>{"oak": 1}',
        ("Hm.\n\nSo.", '{"oak": 1}', []),
    ),
    (
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
        f"<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{GIVEN}",
        ("Hm.", "Look.", [FIND]),
    ),
    (
        "<|channel|>",
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{GIVEN}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.stop<|message|>{}",
        ("", "", [FIND, ("stop", {})]),
    ),
    ("<|channel|>", " to=functions.rob<|channel|>commentary<|message|>{}", ("", "{}", [])),
    ("<|channel|>", "<b>{</b>", ("", "<b>{</b>", [])),
    ("<|channel|>", '{"oak": 1}', ("", '{"oak": 1}', [])),
    ("<|channel|>", "<|channel|>final<|mess", ("", "", [])),
]


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
@pytest.mark.parametrize(("sign", "text", "wanted"), CASES)
def test_what_a_reader_finds(sign, text, wanted, size):
    """None: the text stays as it is."""
    state = "thought" if text.startswith("Hm.") else "start"
    assert read(dialect(sign), text, size, state) == (wanted or ("", text, []))


PARTS = sorted({part for _, text, _ in CASES for part in re.split(r"(?<=[>\]\n])|(?=[<\[])", text)} - {""})


@settings(max_examples=300, deadline=None)
@given(
    sign=st.sampled_from(sorted({sign for sign, *_ in CASES})),
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    state=st.sampled_from(["start", "thought"]),
    cut=st.booleans(),
)
def test_any_text_is_read_alike_however_it_arrives(sign, parts, state, cut):
    readers = [CallReader(TOOLS, dialect=dialect(sign)) for _ in range(2)]
    whole, single = (HarmonyReader(one) if one.dialect.is_harmony else AnswerReader(one, state) for one in readers)
    text = "".join(parts)
    wanted = whole.push(text, True, cut)
    # Some tokens have no text, such as the beginning of a character.
    got = [single.push(one, False) for letter in text for one in (letter, "")] + [single.push("", True, cut)]
    assert "".join(one.thought for one in got) == wanted.thought
    assert "".join(one.text for one in got) == wanted.text
    functions = [[call["function"] for one in said for call in one.calls] for said in (got, [wanted])]
    assert functions[0] == functions[1]


def test_the_beginning_of_a_call_that_is_cut_off():
    begun = '{"q": "a'
    stop, find = '{"name": "stop", "arguments": {}}', f'{{"name": "find", "arguments": {begun}'
    for sign, text, found in (
        ("<TOOLCALL>", f"<TOOLCALL>[{stop}, {find}", ["stop", "find"]),
        ("<TOOLCALL>", f'<TOOLCALL>[{stop}, {stop}, {{"na', ["stop", "stop"]),
        ("<TOOLCALL>", f'<TOOLCALL>[{find}, {{"name":', ["find"]),
        ("<TOOLCALL>", f"<TOOLCALL>{stop}\n{find}", ["stop", "find"]),
        ("<TOOLCALL>", f'<TOOLCALL>{stop}\n{{"name": "stop", "arguments": {{}}}}<', ["stop", "stop"]),
        ("[TOOL_CALLS]", f"[TOOL_CALLS]stop[ARGS]{{}}[TOOL_CALLS]find[ARGS]{begun}", ["stop", "find"]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]find[AR", ["stop"]),
        ("<｜tool▁calls▁begin｜>", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{begun}", ["find"]),
    ):
        calls = CallReader(TOOLS, dialect=dialect(sign)).push(text, True, True)[1]
        assert [call["function"]["name"] for call in calls] == found
        assert found[-1] == "stop" or calls[-1]["function"]["arguments"].startswith(begun)
    for sign, text in {
        "[TOOL_CALLS]": f"[TOOL_CALLS]find[ARGS]{begun}",
        "<|channel|>": f"<|channel|>commentary to=functions.find<|message|>{begun}",
    }.items():
        made = dialect(sign)
        reader = HarmonyReader(CallReader(TOOLS)) if made.is_harmony else AnswerReader(CallReader(TOOLS, dialect=made))
        assert reader.push(text, True, True).calls[0]["function"] == {"name": "find", "arguments": begun}
    text = "<tool_call><function=find><parameter=q>a</parameter><parameter=most>"
    assert read(dialect("<function="), text, 9, cut=True) == ("", "", [("find", {"q": "a"})])


def test_the_dialect_of_a_model():
    assert dialect("") is WHOLE
    assert dialect("<tool_call>") is TAGGED
    assert dialect("<function=", "[TOOL_CALLS]") is dialect("<function="), "a template says more than a vocabulary"
    assert dialect("<tool_call>", "[TOOL_CALLS]") is TAGGED
    assert dialect("", "<|tool_call_start|>") is dialect("<|tool_call_start|>")
    plain = Named("<|channel|>")
    plain.chat_template = "{{ messages }}"  # without tools, the prompt asks for JSON between tags
    assert dialect_of(plain) is TAGGED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        *((odd, 3) for odd in (None, {"type": None}, {"anyOf": 3}, {"type": [["x"]]}, {"type": 5}, {"enum": 3})),
        ({"enum": ["3", None]}, "3"),
        ({"$ref": []}, 3),
        ({"const": "3"}, "3"),
        ({"oneOf": [{"type": "null"}, {"type": ["string"]}]}, "3"),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, "3"),
        ({"anyOf": [{"$ref": "#/$defs/again"}, {"const": "4"}]}, "3"),
        ({"anyOf": [{"$ref": "#/$defs/again"}, {"$ref": "#/none"}, {"$ref": 3}]}, 3),
    ],
)
def test_values_of_parameters_follow_any_schema(schema, value):
    text = "<tool_call><function=f><parameter=a>3</parameter></function></tool_call>"
    shared = {"text": {"type": "string"}, "again": {"anyOf": [{"$ref": "#/$defs/again"}]}}
    for properties in ({"a": schema}, None, [schema]):
        tools = {"f": Parameters({"properties": properties, "$defs": shared})}
        (call,) = CallReader(tools, dialect=dialect("<function=")).push(text, True)[1]
        wanted = value if isinstance(properties, dict) else 3
        assert json.loads(call["function"]["arguments"]) == {"a": wanted}


def test_null_is_a_text_unless_the_schema_has_null():
    for schema, value in ((TEXT, "null"), (NULLABLE, None), ({"enum": ["a", None]}, None), ({"const": "a"}, "null")):
        text = "<tool_call><function=f><parameter=a>null</parameter></function></tool_call>"
        (call,) = CallReader({"f": Parameters({"properties": {"a": schema}})}, dialect=dialect("<function=")).push(
            text, True
        )[1]
        assert json.loads(call["function"]["arguments"]) == {"a": value}


class Counted(dict):
    """A schema that counts how often its types are read."""

    reads = 0

    def get(self, *args):
        Counted.reads += args[0] == "type"
        return super().get(*args)


@pytest.mark.parametrize("sign", ["<function=", "<minimax:tool_call>", "<arg_key>"])
def test_a_long_schema_is_read_once_for_all_calls_and_choices(sign):
    Counted.reads, long = 0, {"anyOf": [Counted(enum=[1])] * 1000 + [{"$ref": "#/" + "/" * 100_000}]}
    shared = {"f": Parameters({"properties": {f"a{i}": {"anyOf": [long] * 40} for i in range(10)}})}
    minimax = '<minimax:tool_call><invoke name="f">{}</invoke></minimax:tool_call>'
    forms = {
        "<function=": ("<tool_call><function=f>{}</function></tool_call>", "<parameter=a{}>3</parameter>"),
        "<minimax:tool_call>": (minimax, '<parameter name="a{}">3</parameter>'),
        "<arg_key>": ("<tool_call>f{}</tool_call>", "<arg_key>a{}</arg_key><arg_value>3</arg_value>"),
    }
    call, argument = forms[sign]
    text = call.format("".join(argument.format(i) for i in range(10))) * 20
    for _ in range(4):
        calls = CallReader(shared, dialect=dialect(sign)).push(text, True)[1]
        assert [json.loads(one["function"]["arguments"]) for one in calls] == [{f"a{i}": 3 for i in range(10)}] * 20
    assert 0 < Counted.reads < 20_000


def test_references_are_followed_once():
    shared = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(3000)}
    schema = {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**shared, "a3000": {"type": "string"}}}
    tools = {"f": Parameters(schema)}
    text = "<tool_call><function=f><parameter=a>3</parameter></function></tool_call>"
    (call,) = CallReader(tools, dialect=dialect("<function=")).push(text, True)[1]
    assert call["function"]["arguments"] == '{"a": "3"}'


def test_a_prompt_with_documents_may_begin_the_reasoning_too(tokenizer):
    own = Tokenizer(tokenizer._fast, {}, "{{ messages[0].content }}<think>\n")
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    reader = reader_of(body, own, Encoded(Segments(["x", Document("A tree."), "y"])))
    assert reader.push("Hm.</think>An oak.", True) == AnswerParts("Hm.", "An oak.", [])


def test_llamas_templates_get_one_call_of_each_answer():
    tool = {"type": "function", "function": {"name": "stop"}}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
    text = '[{"name": "stop", "parameters": {}}, {"name": "stop", "parameters": {}}]'
    for sign, calls in (("", 2), ("This model only supports single tool-calls at once!", 1)):
        reader = reader_of(body, Named(sign), Encoded("x"))  # type: ignore[arg-type]
        assert len(reader.push(text, True).calls) == calls


def test_reasoning_of_gpt_oss_may_stay_in_the_text():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.stop<|channel|>commentary<|message|>"
    )
    said = HarmonyReader(CallReader(TOOLS), separates=False).push(text + "{}", True)
    assert (said.thought, said.text, said.calls[0]["function"]) == ("", "Hm.", {"name": "stop", "arguments": "{}"})


def test_without_tools_calls_are_text_and_reasoning_is_not():
    text = "<think>Hm.</think><tool_call><function=find></function></tool_call>"
    assert AnswerReader(CallReader({}, dialect=dialect("<function="))).push(text, True) == AnswerParts(
        "Hm.", text[18:], []
    )

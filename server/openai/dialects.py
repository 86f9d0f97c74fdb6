"""How models write reasoning and calls of tools.

A function that reads calls gets a text with its tags, the tools' parameters by name, and whether a limit has cut the
text off. It returns the calls' names, and their arguments as JSON text; nothing, if the text is no call.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from keyword import iskeyword
from typing import Any

from runtime.models.tokenizer import Tokenizer
from runtime.sampling.json_text import parse_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Models that ask for tags leave them out, and write objects one after the other, alone or as a block of Markdown.
FENCE, FENCE_END = "```json", "```"
Calls = list[tuple[str, str]]

# Most parts of a tool's schema that are read for the types of its parameters, and least for one parameter; most
# characters of a reference within a schema.
_MOST_PARTS, _LEAST_PARTS, _MOST_CHARACTERS = 1 << 14, 1 << 6, 1 << 10

# A call in JSON that has begun: its name, and the beginning of its arguments.
_BEGUN = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)
_OBJECT = re.compile(r"\s{0,8}(\{|\[\s{0,8}\{)")
_BETWEEN = re.compile(r'\}\s*\{(?=\s*"name"\s*:)')
_NEXT = re.compile(r',\s*(?=\{\s*"name"\s*:)')
_OUTER_TAGS = re.compile(rf"\A(?:<[^>]*>|{FENCE})|(?:</(?!arg_value)[^<>]*>|{FENCE_END})\Z")
# What opens a call or a parameter; the names have bounds, so that no text takes quadratic time.
_FUNCTION = re.compile(r'<function=([^>]{1,200})>|<invoke name="([^">]{1,200})">')
_PARAMETER = re.compile(r'<parameter(?:=| name=")([^">]{1,200})"?>')
_KEY = re.compile(r"<arg_key>([^<]{1,200})</arg_key>\s*<arg_value>")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]{1,200})(?:<｜tool▁sep｜>|\n```json)")
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)", re.DOTALL)
_GEMMA = re.compile(r"call:([^{]{1,200})(\{.*\})", re.DOTALL)
_NONE = re.compile(r"\bNone\b")
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
_PYTHON = {"true": True, "false": False, "null": None}


class Parameters:
    """The parameters of a tool.

    Args:
        schema: the JSON schema of the tool's arguments; it may be long.
    """

    def __init__(self, schema: Mapping[str, Any]):
        self._schema, self._kinds = schema, dict[str, set[str]]()
        self._left = _MOST_PARTS

    def kinds(self, name: str) -> set[str]:
        """The types that a parameter may have. They are read once, because an answer may have thousands of calls."""
        properties = self._schema.get("properties")
        if not isinstance(properties, dict) or name not in properties:
            return set()
        if name not in self._kinds:
            self._kinds[name], parts = _kinds(properties[name], self._schema, max(self._left, _LEAST_PARTS))
            self._left -= parts
        return self._kinds[name]


Schemas = Mapping[str, Parameters]
_UNKNOWN = Parameters({})


def read_json(text: str, schemas: Schemas, cut: bool) -> Calls:
    """JSON objects with name and arguments, in a list or not; with `cut` also the beginning of the last one."""
    try:
        value = parse_json(text)
    except ValueError:
        text = _BETWEEN.sub("},{", text.strip())
        text = text if text.startswith("[") else f"[{text}"
        try:
            value = parse_json(f"{text}]")
        except ValueError:
            return _read_cut(text, schemas) if cut else []
    entries = value if isinstance(value, list) else [value]
    calls = [(entry.get("name"), _arguments(entry)) for entry in entries if isinstance(entry, dict)]
    return [(name, given) for name, given in calls if isinstance(name, str)] if len(calls) == len(entries) else []


def _read_cut(text: str, schemas: Schemas) -> Calls:
    for comma in reversed([*_NEXT.finditer(text)][-4:]):  # some may stand within strings
        if whole := read_json(f"{text[: comma.start()]}]", schemas, False):
            return whole + _read_cut(text[comma.end() :], schemas)
    if (found := _BEGUN.match(text)) is None:
        return []
    given = found[2]
    with suppress(ValueError, RecursionError):
        given = given[: json.JSONDecoder().raw_decode(given)[1]]  # the call may go on behind its arguments
    return [(found[1], given)]


@dataclass(slots=True)
class Closing:
    """Where the search for a call's closing tag stands, behind the opening tag; `in_string`: of JSON."""

    at: int = 0
    in_string: bool = False


def end_of_call(text: str, start: int, closing: str, inner: str = ">", search: Closing | None = None) -> int:
    """Where the tag that closes a call begins, at or behind `start`; -1 if it is missing.

    Strings of JSON may have the tag, and so may values between other tags, unless `inner` stands before it.
    """
    search = search or Closing()
    is_json, at = _OBJECT.match(text, start) is not None, start + search.at
    end = text.find(closing, at + bool(search.at))
    while end >= 0:
        if is_json:
            search.in_string ^= bool(text[at:end].replace("\\\\", "").replace('\\"', "").count('"') % 2)
            if not search.in_string:
                return end
        elif text.find("<", start, end) < 0 or text[max(start, end - 40) : end].rstrip().endswith(inner):
            return end
        search.at, at, end = end - start, end, text.find(closing, end + 1)
    return -1


def _arguments(entry: dict[str, Any]) -> str:
    arguments = entry.get("arguments", entry.get("parameters", {}))
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read_tagged(text: str, schemas: Schemas, cut: bool) -> Calls:
    """The forms between `<tool_call>` tags: JSON, `<function=NAME>` or a name with `<arg_key>`."""
    inner = text if text.startswith("<function=") else _OUTER_TAGS.sub("", text)
    if inner.lstrip()[:1] in ("{", "["):
        return read_json(inner, schemas, cut)
    if "<function=" in inner:
        return _read_xml(inner, schemas, cut)
    name, key, rest = inner.partition("<arg_key>")
    return [(name.strip(), _typed(_blocks(_KEY, "</arg_value>", key + rest), schemas.get(name.strip(), _UNKNOWN)))]


def _blocks(opening: re.Pattern[str], closing: str, text: str, is_wrapped: bool = False) -> Iterator[tuple[str, str]]:
    """The name in each match of `opening`, and the text up to its `closing`, which no text but the next match follows.

    `is_wrapped`: line breaks at the text's ends do not belong to it. An unclosed text ends them.
    """
    found = opening.search(text)
    while found is not None:
        following = opening.search(text, found.end())
        limit = following.start() if following else len(text)
        end = text.rfind(closing, found.end(), limit)
        if end < 0 or text[end + len(closing) : limit].strip():
            end = text.find(closing, found.end())
            following = opening.search(text, end)
        if end < 0:
            return
        inner = text[found.end() : end]
        yield found[1], inner.removeprefix("\n").removesuffix("\n") if is_wrapped else inner
        found = following


def _read_xml(text: str, schemas: Schemas, cut: bool, is_wrapped: bool = True) -> Calls:
    calls, at = Calls(), 0
    while found := _FUNCTION.search(text, at):
        name, closing = found[1] or found[2], "</function>" if found[1] else "</invoke>"
        end = end_of_call(text, found.end(), closing, "</parameter>")
        at = end if end >= 0 else len(text)
        inner = text[found.end() : at].strip()
        if inner[:1] != "{":  # Llama's and Functionary's models write all arguments as one JSON object
            inner = _typed(_blocks(_PARAMETER, "</parameter>", inner, is_wrapped), schemas.get(name, _UNKNOWN))
        calls.append((name, inner))
    return calls


_read_inline = partial(_read_xml, is_wrapped=False)


def _typed(given: Iterable[tuple[str, str]], parameters: Parameters) -> str:
    """Arguments as JSON text: strings as they are, values of other types read as JSON."""

    def value(name: str, text: str) -> Any:
        kinds = parameters.kinds(name)
        if "string" in kinds and (text not in ("null", "None") or "null" not in kinds):
            return text
        try:
            return parse_json({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
        except ValueError:
            return text

    return json.dumps({name: value(name, text) for name, text in given}, ensure_ascii=False)


def _kinds(schema: Any, root: Mapping[str, Any], most: int) -> tuple[set[str], int]:
    """The types that the `most` first parts of a schema name, themselves or by references; the number of parts read."""
    kinds, left = set[str](), [schema]
    seen, parts = set[str](), 0
    while left and parts < most:
        one = left.pop()
        parts += 1
        if not isinstance(one, dict):
            continue
        types, values, *unions = (one.get(key, []) for key in ("type", "enum", "anyOf", "oneOf", "allOf"))
        types, values = types if isinstance(types, list) else [types], values if isinstance(values, list) else []
        kinds.update(kind for kind in types[:most] if isinstance(kind, str))
        for value in [*values[:most], one.get("const", 0)]:
            parts += 1
            kinds |= {"string"} if isinstance(value, str) else {"null"} if value is None else set()
        for union in unions:
            left += union[:most] if isinstance(union, list) else []
        reference = one.get("$ref")
        if isinstance(reference, str) and len(reference) <= _MOST_CHARACTERS and reference not in seen:
            seen.add(reference)
            left.append(reduce(_member, reference.split("/")[1:], root))
    return kinds, parts


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


class _Names(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null` by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_PYTHON[node.id]) if node.id in _PYTHON else node


def _read_python(text: str, schemas: Schemas, cut: bool) -> Calls:
    """Python's calls with keywords, alone or in a list (LFM2)."""
    inner = text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>").strip()
    try:
        tree = _Names().visit(ast.parse(inner, mode="eval").body)
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [
            ("-".join([*before, ast.unparse(call.func)]), _keywords(call))
            for *before, call in map(_hyphenated, nodes)
            if isinstance(call, ast.Call)
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return read_json(inner, schemas, cut)


def _hyphenated(node: ast.AST) -> list[Any]:
    """The parts of a name with hyphens, which Python takes for a difference, and the call with the last one."""
    return [ast.unparse(node.left).replace(" ", ""), node.right] if isinstance(node, ast.BinOp) else [node]


def _keywords(call: ast.Call) -> str:
    """The arguments as JSON text. Raises ValueError for arguments without a name, and lone surrogates."""
    given = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
    if call.args or len(given) < len(call.keywords):
        raise ValueError
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # pairs of surrogates become characters


def _read_mistral(text: str, schemas: Schemas, cut: bool) -> Calls:
    calls = Calls()
    for part in text.split("[TOOL_CALLS]")[1:]:
        found = _MISTRAL.fullmatch(part)
        read = [(found[1], found[2].strip())] if found else read_json(part, schemas, cut)
        if not read:
            return calls if cut else []
        calls += read
    return calls


def _read_deepseek(text: str, schemas: Schemas, cut: bool) -> Calls:
    found = _blocks(_DEEPSEEK, _DEEPSEEK_END, text if not cut or text.endswith(_DEEPSEEK_END) else text + _DEEPSEEK_END)
    return [(name.strip(), given.strip().removesuffix("```").strip()) for name, given in found]


def _read_gemma(text: str, schemas: Schemas, cut: bool) -> Calls:
    """`call:NAME{key:value}`, with `<|"|>` around strings."""
    found = _GEMMA.search(text)
    if found is None:
        return []
    parts = found[2].split('<|"|>')
    parts[::2] = [_BARE_KEY.sub(r'\1"\2":', _NONE.sub("null", part)) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return [(found[1].strip(), "".join(parts))]


def _write_json(function: Mapping[str, Any]) -> str:
    return f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}"


def _write_python(function: Mapping[str, Any]) -> str:
    given = function["arguments"]
    if not isinstance(given, dict) or not all(name.isidentifier() and not iskeyword(name) for name in given):
        return _write_json(function)
    values = {k: json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for k, v in given.items()}
    keywords = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"<|tool_call_start|>[{function['name']}({keywords})]<|tool_call_end|>"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes reasoning and calls.

    Attributes:
        read: reads calls.
        write: the text of an earlier call, from its name and arguments, for chat templates that write none.
        tags: pairs of tags around calls; an empty second tag is the answer's end. Without tags, the whole answer
            consists of calls, or of none.
        thoughts: the tags around reasoning.
        is_json: whether calls are in JSON, so that a grammar keeps them to their schemas.
        is_harmony: whether answers consist of messages with channels, see `HarmonyReader`.
    """

    read: Callable[[str, Schemas, bool], Calls] = _read_tagged
    tags: tuple[tuple[str, str], ...] = ((OPEN, CLOSE),)
    thoughts: tuple[str, str] = ("<think>", "</think>")
    write: Callable[[Mapping[str, Any]], str] = _write_json
    is_json: bool = False
    is_harmony: bool = False


TAGGED = Dialect(tags=((OPEN, CLOSE), (f"{FENCE}\n", f"\n{FENCE_END}")), is_json=True)
WHOLE = Dialect(read_json, (), is_json=True)
_XML = ((OPEN, CLOSE), ("<function=", CLOSE))  # some models leave the first tag out
# By a text in the chat template, or a token of the vocabulary.
_DIALECTS = {
    "<|channel|>": Dialect(is_harmony=True),
    "<|tool_call>": Dialect(_read_gemma, (("<|tool_call>", "<tool_call|>"),), ("<|channel>thought\n", "<channel|>")),
    "<|tool_call_start|>": Dialect(_read_python, (("<|tool_call_start|>", "<|tool_call_end|>"),), write=_write_python),
    "[TOOL_CALLS]": Dialect(_read_mistral, (("[TOOL_CALLS]", ""),), ("[THINK]", "[/THINK]")),
    "<｜tool▁calls▁begin｜>": Dialect(_read_deepseek, (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)),
    "<minimax:tool_call>": Dialect(_read_inline, (("<minimax:tool_call>", "</minimax:tool_call>"),)),
    "<seed:tool_call>": Dialect(
        _read_inline, (("<seed:tool_call>", "</seed:tool_call>"),), ("<seed:think>", "</seed:think>")
    ),
    "<TOOLCALL>": Dialect(tags=(("<TOOLCALL>", "</TOOLCALL>"),)),
    "<function=": Dialect(tags=_XML),
    "<arg_key>": Dialect(),
}


@lru_cache(maxsize=8)
def writes_special(tokenizer: Tokenizer) -> bool:
    """Whether the model's tags are special tokens, which texts otherwise lack."""
    dialect, special = dialect_of(tokenizer), {tokenizer.token_text(token) for token in tokenizer.special_ids}
    tags = [tag for pair in (*dialect.tags, dialect.thoughts) for tag in pair if tag]
    return dialect.is_harmony or any(mark in tag for tag in tags for mark in special)


@lru_cache(maxsize=8)
def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """The dialect of a model. If its chat template does not support tools, `render_chat` asks for JSON between tags."""
    template = tokenizer.chat_template or ""
    if "tools" not in template:
        return TAGGED
    for sign, dialect in _DIALECTS.items():
        if sign in template:
            return dialect
    if OPEN in template:
        return TAGGED
    # Some templates write no calls, so the model's tokens tell.
    return next((dialect for sign, dialect in _DIALECTS.items() if sign in tokenizer.added_texts), WHOLE)

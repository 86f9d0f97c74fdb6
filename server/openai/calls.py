"""Grammars and a parser for tool calls.

The parser reads three formats: a JSON object between `<tool_call>` tags (Qwen, Hermes, SmolLM2), a list after
`[TOOL_CALLS]` (Mistral), and a text that is a single JSON object (Llama).
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from runtime.models.tokenizer import Tokenizer
from runtime.params import Lazy, SamplingParams
from runtime.sampling.json_text import parse_json
from server.openai.tools import CLOSE, OPEN, Tool

# A call that has begun: its name, and the beginning of its arguments.
_BEGUN = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)
_MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")

# White space between the parts of a call. The model may have begun the call with more of it before the grammar applies.
_SPACE, _MORE_SPACE = r"[ \n]?", r"[ \n\t]{0,8}"
_TAGGED = 'start: "<tool_call>" SPACE call SPACE "</tool_call>"'
_WHOLE = (
    'start: SPACE (("[TOOL_CALLS]" | "<|python_tag|>") SPACE)? (call | list)\n'
    'list: "[" SPACE call (SPACE "," SPACE call)* SPACE "]"'
)


def lazy_calls(sampling: SamplingParams, tools: list[Tool], tagged: bool) -> tuple[SamplingParams, SamplingParams]:
    """Sampling parameters whose grammar applies from the point where the model begins a call.

    Args:
        sampling: parameters without a grammar.
        tools: the tools that may be called.
        tagged: see `CallReader`.

    Returns:
        Parameters whose grammar follows the tools' schemas, and a fallback whose grammar allows any arguments, for
        schemas that no grammar can express.
    """
    names = [tool.function.name for tool in tools]
    starts = [f'{bracket}{{"name":"{name}"' for name in names for bracket in ("", "[")]
    lazy = Lazy(triggers=[OPEN]) if tagged else Lazy(triggers=[*_MARKERS, *starts], at_start=True)
    keys = ("arguments",) if tagged else ("arguments", "parameters")
    any_call = {
        "type": "object",
        "properties": {"name": {"enum": names}, **{key: {"type": "object"} for key in keys}},
        "required": ["name"] if len(keys) > 1 else ["name", *keys],
        "additionalProperties": False,
    }
    loose = sampling.model_copy(update={"grammar": _lazy_grammar(any_call, tagged), "lazy": lazy})
    try:
        schema = json.loads(schema_of_call([_bare(tool) for tool in tools], keys))
        strict = SamplingParams.model_validate({**loose.model_dump(), "grammar": _lazy_grammar(schema, tagged)})
    except ValidationError:  # the grammar is too long
        return loose, loose
    return strict, loose


def calls_or_format(tools: list[Tool], schema: str, tagged: bool) -> str:
    """A grammar of answers that are calls or follow a JSON schema, in JSON text."""
    calls = _lazy_grammar(json.loads(schema_of_call([_bare(tool) for tool in tools])), tagged)
    form = json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **json.loads(schema)})
    start, rest = calls.split("\n", 1)
    rule = start.removeprefix("start: ")
    return f"start: ({rule}) | form\n{rest}form: %json {form}\n"


def _lazy_grammar(schema: dict[str, Any], tagged: bool) -> str:
    space = _SPACE if tagged else _MORE_SPACE
    # Lenient: keywords that no grammar can express are ignored.
    call = json.dumps({"x-guidance": {"whitespace_pattern": space, "lenient": True}, **schema})
    return f"{_TAGGED if tagged else _WHOLE}\ncall: %json {call}\nSPACE: /{space}/\n"


def _bare(tool: Tool) -> Tool:
    """The tool without the descriptions and titles in its schema."""
    function = tool.function.model_copy(update={"parameters": _without_words(tool.schema_of_arguments())})
    return tool.model_copy(update={"function": function})


def _without_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_words(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("enum", "const") else _without_words(value)
        for key, value in schema.items()
        if key not in ("description", "title") or not isinstance(value, str)
    }


def schema_of_call(tools: list[Tool], keys: Sequence[str] = ("arguments",)) -> str:
    """The JSON schema, as text, of a call of one of the tools; `keys`: allowed names for the field of arguments."""
    definitions, forms = {}, []
    for i, tool in enumerate(tools):
        # If a schema lists properties without `additionalProperties`, no others are allowed.
        schema = tool.schema_of_arguments()
        closed = {"additionalProperties": False} | schema if "properties" in schema else schema
        definitions[f"tool{i}"] = _moved(closed, f"#/$defs/tool{i}/")
        for key in keys:
            form = {"name": {"const": tool.function.name}, key: {"$ref": f"#/$defs/tool{i}"}}
            closed_form = {"properties": form, "required": ["name", key], "additionalProperties": False}
            forms.append({"type": "object", **closed_form})
    return json.dumps({"anyOf": forms, "$defs": definitions})


def _moved(schema: Any, root: str) -> Any:
    """The schema with its internal references rewritten, because it moves to `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        moved["$ref"] = root + reference[2:]
    return moved


@dataclass(slots=True)
class CallReader:
    """Incremental parser of tool calls.

    Attributes:
        names: tools that may be called; calls of other tools remain text.
        forced: whether the whole text is one call.
        single: whether to drop all calls but the first.
        tagged: whether the model writes calls between tags; otherwise its whole text consists of calls, or of none.
    """

    names: frozenset[str]
    forced: bool = False
    single: bool = False
    tagged: bool = True
    num_calls: int = 0
    _held: str = field(default="", init=False)
    _plain: bool = field(default=False, init=False)
    _cut: bool = field(default=False, init=False)

    def push(self, text: str, last: bool, cut: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Add text; returns the text that is final, and the calls in OpenAI's form.

        Args:
            last: whether no further text follows.
            cut: whether a limit has ended the text. Then a call that was being written is returned as far as it is.
        """
        if not self.names:
            return text, []
        self._held += text
        self._cut = cut
        if self.tagged and not self.forced:
            shown, found = self._between_tags(last)
        else:
            shown, found = self._whole(last)
        if self.single:
            found = found[: max(1 - self.num_calls, 0)]
        calls = [self._numbered(name, arguments) for name, arguments in found]
        return shown, calls

    def _between_tags(self, last: bool) -> tuple[str, list[tuple[str, str]]]:
        shown, found = "", []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0 and not last:
                break
            inner = self._held[start + len(OPEN) : end if end >= 0 else None]
            stop = end + len(CLOSE) if end >= 0 else len(self._held)
            calls = self._read(inner)
            shown += self._held[:start].rstrip("\n") if calls else self._held[:stop]
            found += calls
            self._held = self._held[stop:].lstrip("\n") if calls else self._held[stop:]
        keep = len(self._held) if last else self._settled(start)
        shown, self._held = shown + self._held[:keep], self._held[keep:]
        return shown, found

    def _settled(self, start: int) -> int:
        """Length of the held text that is final: up to the tag at `start`, or for -1 to a possible beginning of one."""
        start = before_tag(self._held, OPEN) if start < 0 else start
        return len(self._held[:start].rstrip("\n"))

    def _whole(self, last: bool) -> tuple[str, list[tuple[str, str]]]:
        text = self._held.lstrip()
        starts = any(marker.startswith(text[: len(marker)]) for marker in _MARKERS) or text[:1] in ("{", "[")
        if not last and not self._plain and (starts or not text):
            return "", []
        self._plain = True
        for marker in _MARKERS:
            text = text.removeprefix(marker)
        shown, self._held = self._held, ""
        calls = self._read(text) if starts else []
        return ("", calls) if calls else (shown, [])

    def _read(self, text: str) -> list[tuple[str, str]]:
        """The calls in a JSON text that is one call or a list of calls; empty for other texts."""
        try:
            value = parse_json(text)
        except ValueError:
            return self._begun(text) if self._cut else []
        entries = value if isinstance(value, list) else [value]
        calls = [(entry.get("name"), _arguments(entry)) for entry in entries if isinstance(entry, dict)]
        known = [(name, arguments) for name, arguments in calls if isinstance(name, str) and name in self.names]
        return known if len(known) == len(entries) else []

    def _begun(self, text: str) -> list[tuple[str, str]]:
        """The call in the beginning of a JSON text, with the text of its arguments as far as it is."""
        found = _BEGUN.match(text)
        return [(found[1], found[2])] if found and found[1] in self.names else []

    def _numbered(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        function = {"name": name, "arguments": arguments}
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": function,
        }


def text_input(arguments: str) -> str:
    """The argument `input` of a custom tool's call; the whole text if it is missing."""
    try:
        given = parse_json(arguments)
    except ValueError:
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def before_tag(text: str, tag: str) -> int:
    """Length of the text without a beginning of the tag at its end."""
    return len(text) - next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def _arguments(entry: dict[str, Any]) -> str:
    arguments = entry.get("arguments", entry.get("parameters", {}))
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def writes_tags(tokenizer: Tokenizer) -> bool:
    """Whether the model's chat template writes calls between tags, or does not support tools."""
    template = tokenizer.chat_template or ""
    return OPEN in template or "tools" not in template

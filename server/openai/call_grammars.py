"""Grammars of tool calls in JSON: between `<tool_call>` tags (Qwen, Hermes, SmolLM2), or as the whole text (Llama)."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from runtime.json_text import parse_schema
from runtime.models.tokenizer import Tokenizer
from runtime.params import Lazy, SamplingParams
from server.openai.dialects.dialect import CLOSE, OPEN
from server.openai.dialects.tagged import FENCE, FENCE_END
from server.openai.schemas import Expressions, definitions_of
from server.openai.tools import Tool

MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")

# White space between the parts of a call. The model may have begun the call with more of it before the grammar applies.
_SPACE, _MORE_SPACE = r"[ \n]?", r"[ \n\t]{0,8}"
_LIST = 'list: "[" SPACE call (SPACE "," SPACE call)* SPACE "]"'
_UNTAGGED = f'(SPACE call)+ SPACE | SPACE "{FENCE}" (SPACE call)+ SPACE "{FENCE_END}"'


def lazy_calls(
    tokenizer: Tokenizer, sampling: SamplingParams, tools: list[Tool], tagged: bool
) -> tuple[SamplingParams, SamplingParams]:
    """Sampling parameters whose grammar applies from the point where the model begins a call.

    Args:
        tokenizer: the model's.
        sampling: parameters without a grammar.
        tools: the tools that may be called.
        tagged: whether the model writes calls between tags.

    Returns:
        Parameters whose grammar follows the tools' schemas, and a fallback whose grammar allows any arguments, for
        schemas that no grammar can express.
    """
    names = [tool.function.name for tool in tools]
    starts = [f'{before}{{"name":"{name}"' for name in names for before in ("", FENCE if tagged else "[")]
    lazy = Lazy(triggers=[OPEN], starts=starts) if tagged else Lazy(starts=[*MARKERS, *starts])
    keys = ("arguments",) if tagged else ("arguments", "parameters")
    grammar = _lazy_grammar(tokenizer, schema_of_any_call(tools, keys), tagged)
    loose = sampling.model_copy(update={"grammar": grammar, "lazy": lazy})
    try:
        schema = json.loads(schema_of_call(tools, keys))
        strict = SamplingParams.model_validate(
            {**loose.model_dump(), "grammar": _lazy_grammar(tokenizer, schema, tagged)}
        )
    except ValidationError:  # the grammar is too long
        return loose, loose
    return strict, loose


def calls_or_format(tokenizer: Tokenizer, tools: list[Tool], schema: str, tagged: bool) -> str:
    """A grammar of answers that are calls or follow a JSON schema, in JSON text. Raises InvalidRequest."""
    calls, rules = _rules(tokenizer, json.loads(schema_of_call(tools)), tagged)
    more = f" (SPACE {calls})*" if tagged else ""
    return f"start: {calls}{more} | form\n{rules}form: {_form(schema)}\n"


def behind_reasoning(tokenizer: Tokenizer, sampling: SamplingParams, begins: Sequence[str]) -> SamplingParams:
    """The parameters with their schema or regular expression from one of the texts on, which ends the reasoning.

    Other constraints, and expressions of several lines, hold for the whole output. Raises InvalidRequest.
    """
    if sampling.json_schema is not None:
        form = _form(sampling.json_schema)
    elif sampling.regex is not None and "\n" not in sampling.regex:
        form = "/" + re.sub(r"(?<!\\)/", r"\/", sampling.regex) + "/"
    else:
        return sampling
    ends = " | ".join(_literal(tokenizer, text) for text in begins)
    grammar = f"start: ({ends}) SPACE form\nform: {form}\nSPACE: /{_MORE_SPACE}/\n"
    lazy = Lazy(triggers=list(begins), to_end=True)
    changed = {"grammar": grammar, "json_schema": None, "regex": None, "lazy": lazy}
    try:
        return SamplingParams.model_validate({**sampling.model_dump(), **changed})
    except ValidationError:  # the grammar is too long
        return sampling


def _form(schema: str) -> str:
    """The rule of a text that follows a schema, in JSON text. Raises InvalidRequest."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **parse_schema(schema)})


@lru_cache(maxsize=64)
def _literal(tokenizer: Tokenizer, text: str) -> str:
    """The rule of a text. Parts of it may be tokens of their own, which the model writes or spells."""
    tokens = {one: tokenizer.token_to_id(one) for one in tokenizer.added_texts if one in text}
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    rules = [f"({json.dumps(one)} | <[{tokens[one]}]>)" if one in tokens else json.dumps(one) for one in parts if one]
    return f"({' '.join(rules)})"


def _lazy_grammar(tokenizer: Tokenizer, schema: dict[str, Any], tagged: bool) -> str:
    calls, rules = _rules(tokenizer, schema, tagged)
    return f"start: {calls}{f' | {_UNTAGGED}' if tagged else ''}\n{rules}"


def _rules(tokenizer: Tokenizer, schema: dict[str, Any], tagged: bool) -> tuple[str, str]:
    """The rule of a call between tags, or of an answer of calls alone, and the rules that it needs."""
    call = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _MORE_SPACE, "lenient": True}})
    rules = f"call: %json {call}\nSPACE: /{_MORE_SPACE}/\n"
    open_, close, *markers = (_literal(tokenizer, text) for text in (OPEN, CLOSE, *MARKERS))
    if tagged:
        return f"({open_} SPACE call SPACE {close})", rules
    return f"(SPACE (({' | '.join(markers)}) SPACE)? (call | list))", f"{_LIST}\n{rules}"


def schema_of_any_call(tools: list[Tool], keys: Sequence[str] = ("arguments",)) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools with any arguments."""
    return {
        "type": "object",
        "properties": {
            "name": {"enum": [tool.function.name for tool in tools]},
            **{key: {"type": "object"} for key in keys},
        },
        "required": ["name"] if len(keys) > 1 else ["name", *keys],
        "additionalProperties": False,
    }


def schema_of_call(tools: list[Tool], keys: Sequence[str] = ("arguments",)) -> str:
    """The JSON schema, as text, of a call of one of the tools; `keys`: allowed names for the field of arguments."""
    definitions: dict[str, Any] = {}
    forms, expressions = [], Expressions()
    for i, tool in enumerate(tools):
        definitions |= definitions_of(tool.schema_of_arguments(), f"tool{i}", expressions)
        for key in keys:
            form = {"name": {"const": tool.function.name}, key: {"$ref": f"#/$defs/tool{i}"}}
            closed_form = {"properties": form, "required": ["name", key], "additionalProperties": False}
            forms.append({"type": "object", **closed_form})
    # Lenient: formats that no grammar can express are ignored.
    return json.dumps({"anyOf": forms, "$defs": definitions, "x-guidance": {"lenient": True}})

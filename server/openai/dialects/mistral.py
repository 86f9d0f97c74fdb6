"""`[TOOL_CALLS]` before a JSON list, or before a name and `[ARGS]` (Mistral)."""

import re

from server.openai.dialects.dialect import Calls, Dialect
from server.openai.dialects.json_objects import read_json
from server.openai.dialects.parameters import Schemas

_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)", re.DOTALL)


def _read_mistral(text: str, schemas: Schemas, cut: bool) -> Calls:
    calls = Calls()
    for part in text.split("[TOOL_CALLS]")[1:]:
        found = _MISTRAL.fullmatch(part)
        read = [(found[1], found[2].strip())] if found else read_json(part, schemas, cut)
        if not read:
            return calls if cut else []
        calls += read
    return calls


MISTRAL = Dialect(_read_mistral, (("[TOOL_CALLS]", ""),), ("[THINK]", "[/THINK]"))

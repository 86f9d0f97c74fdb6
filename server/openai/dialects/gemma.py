"""`call:NAME{key:value}`, with `<|"|>` around strings (Gemma)."""

import json
import re

from server.openai.dialects.dialect import Calls, Dialect
from server.openai.dialects.parameters import Schemas

_GEMMA = re.compile(r"call:([^{]{1,200})(\{.*\})", re.DOTALL)
_NONE = re.compile(r"\bNone\b")
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')


def _read_gemma(text: str, schemas: Schemas, cut: bool) -> Calls:
    """`call:NAME{key:value}`, with `<|"|>` around strings."""
    found = _GEMMA.search(text)
    if found is None:
        return []
    parts = found[2].split('<|"|>')
    parts[::2] = [_BARE_KEY.sub(r'\1"\2":', _NONE.sub("null", part)) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return [(found[1].strip(), "".join(parts))]


GEMMA = Dialect(_read_gemma, (("<|tool_call>", "<tool_call|>"),), ("<|channel>thought\n", "<channel|>"))

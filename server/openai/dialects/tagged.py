"""Calls between `<tool_call>` tags: in JSON (Hermes, Qwen, SmolLM2), as elements (Qwen-Coder), or as a name with
`<arg_key>` (GLM)."""

import re

from server.openai.dialects.dialect import CLOSE, OPEN, Calls, Dialect
from server.openai.dialects.json_objects import read_json
from server.openai.dialects.parameters import UNKNOWN, Schemas, typed
from server.openai.dialects.tags import blocks

# Models that ask for tags leave them out, and write objects one after the other, alone or as a block of Markdown.
FENCE, FENCE_END = "```json", "```"
_OUTER_TAGS = re.compile(rf"\A(?:<[^>]*>|{FENCE})|(?:</(?!arg_value)[^<>]*>|{FENCE_END})\Z")
_KEY = re.compile(r"<arg_key>([^<]{1,200})</arg_key>\s*<arg_value>")


def _read_tagged(text: str, schemas: Schemas, cut: bool) -> Calls:
    """The forms between `<tool_call>` tags: JSON, `<function=NAME>` or a name with `<arg_key>`."""
    inner = text if text.startswith("<function=") else _OUTER_TAGS.sub("", text)
    if inner.lstrip()[:1] in ("{", "["):
        return read_json(inner, schemas, cut)
    if "<function=" in inner:
        from server.openai.dialects.xml import read_xml

        return read_xml(inner, schemas, cut)
    name, key, rest = inner.partition("<arg_key>")
    return [(name.strip(), typed(blocks(_KEY, "</arg_value>", key + rest), schemas.get(name.strip(), UNKNOWN)))]


# JSON; the model may write a block of Markdown in place of the tags.
TAGGED = Dialect(_read_tagged, ((OPEN, CLOSE), (f"{FENCE}\n", f"\n{FENCE_END}")), is_json=True)
UPPER = Dialect(_read_tagged, (("<TOOLCALL>", "</TOOLCALL>"),))
ELEMENTS = Dialect(_read_tagged, ((OPEN, CLOSE), ("<function=", CLOSE)))  # some models leave the first tag out
KEYS = Dialect(_read_tagged)
HARMONY = Dialect(_read_tagged, is_harmony=True)

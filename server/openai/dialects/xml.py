"""Calls as elements with a name: `<function=NAME>` with `<parameter=NAME>`, or `<invoke name="NAME">`."""

import re
from functools import partial

from server.openai.dialects.dialect import Calls, Dialect
from server.openai.dialects.parameters import UNKNOWN, Schemas, typed
from server.openai.dialects.tags import blocks, end_of_call

# What opens a call or a parameter; the names have bounds, so that no text takes quadratic time.
_FUNCTION = re.compile(r'<function=([^>]{1,200})>|<invoke name="([^">]{1,200})">')
_PARAMETER = re.compile(r'<parameter(?:=| name=")([^">]{1,200})"?>')


def read_xml(text: str, schemas: Schemas, cut: bool, is_wrapped: bool = True) -> Calls:
    calls, at = Calls(), 0
    while found := _FUNCTION.search(text, at):
        name, closing = found[1] or found[2], "</function>" if found[1] else "</invoke>"
        end = end_of_call(text, found.end(), closing, "</parameter>")
        at = end if end >= 0 else len(text)
        inner = text[found.end() : at].strip()
        if inner[:1] != "{":  # Llama's and Functionary's models write all arguments as one JSON object
            inner = typed(blocks(_PARAMETER, "</parameter>", inner, is_wrapped), schemas.get(name, UNKNOWN))
        calls.append((name, inner))
    return calls


_read_inline = partial(read_xml, is_wrapped=False)
MINIMAX = Dialect(_read_inline, (("<minimax:tool_call>", "</minimax:tool_call>"),))
SEED = Dialect(_read_inline, (("<seed:tool_call>", "</seed:tool_call>"),), ("<seed:think>", "</seed:think>"))

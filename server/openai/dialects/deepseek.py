"""Calls between DeepSeek's own tokens, with arguments in JSON."""

import re

from server.openai.dialects.dialect import Calls, Dialect
from server.openai.dialects.parameters import Schemas
from server.openai.dialects.tags import blocks

_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]{1,200})(?:<｜tool▁sep｜>|\n```json)")
_DEEPSEEK_END = "<｜tool▁call▁end｜>"


def _read_deepseek(text: str, schemas: Schemas, cut: bool) -> Calls:
    found = blocks(_DEEPSEEK, _DEEPSEEK_END, text if not cut or text.endswith(_DEEPSEEK_END) else text + _DEEPSEEK_END)
    return [(name.strip(), given.strip().removesuffix("```").strip()) for name, given in found]


DEEPSEEK = Dialect(_read_deepseek, (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),))

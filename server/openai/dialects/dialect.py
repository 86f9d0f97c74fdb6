"""How a model writes reasoning and calls."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.openai.dialects.parameters import Schemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Calls = list[tuple[str, str]]


def write_json(function: Mapping[str, Any]) -> str:
    return f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes reasoning and calls.

    Attributes:
        read: reads calls from a text with its tags, the tools' parameters by name, and whether a limit has cut the text
            off. It returns the calls' names, and their arguments as JSON text; nothing, if the text is no call.
        write: the text of an earlier call, from its name and arguments, for chat templates that write none.
        tags: pairs of tags around calls; an empty second tag is the answer's end. Without tags, the whole answer
            consists of calls, or of none.
        thoughts: the tags around reasoning.
        is_json: whether calls are in JSON, so that a grammar keeps them to their schemas.
        is_harmony: whether answers consist of messages with channels, see `HarmonyReader`.
    """

    read: Callable[[str, Schemas, bool], Calls]
    tags: tuple[tuple[str, str], ...] = ((OPEN, CLOSE),)
    thoughts: tuple[str, str] = ("<think>", "</think>")
    write: Callable[[Mapping[str, Any]], str] = write_json
    is_json: bool = False
    is_harmony: bool = False

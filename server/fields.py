"""Writes FIELDS.md from the classes of request bodies."""

import json
from collections import defaultdict

from server.anthropic.types import AnthropicTool, CacheControl, MessagesRequest, Thinking
from server.generation.bodies import SamplingBody
from server.http.body import Body
from server.http.fields import EMPTY, SAMPLERS, STRANGERS
from server.openai.formats import StructuredOutputs
from server.openai.infill import InfillRequest
from server.openai.messages import Message
from server.openai.tokens import DetokenizeRequest, TokenizeRequest
from server.openai.types import ChatRequest, CompletionRequest, StreamOptions
from server.responses.types import ReasoningOptions, ResponseRequest, TextConfig, TextFormat
from server.sglang.generate import GenerateRequest

BODIES: dict[str, type[Body]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
    "`/infill`": InfillRequest,
    "`/generate`": GenerateRequest,
    "`sampling_params`": SamplingBody,
    "`structured_outputs`": StructuredOutputs,
    "`stream_options`": StreamOptions,
    "`reasoning`": ReasoningOptions,
    "`text`": TextConfig,
    "`text.format`": TextFormat,
    "messages": Message,
    "`/tokenize`": TokenizeRequest,
    "`/detokenize`": DetokenizeRequest,
    "`/v1/messages`": MessagesRequest,
    "its `cache_control`": CacheControl,
    "its `thinking`": Thinking,
    "its `tools`": AnthropicTool,
}


_HEADING = """\
# Fields of other servers

Fields of vLLM, SGLang, llama.cpp, OpenAI and others that Ramet accepts, leaves out or refuses by name. `make docs`
writes this page. A field that is on no list here is refused if it is near a known name, and else left out. The answer
lists in `left_out` what was left out.
"""
_PEERS = f"Known fields of others, which are left out: {', '.join(f'`{name}`' for name in sorted(STRANGERS))}."


def fields_page() -> str:
    """The text of FIELDS.md: a table of fields, the bodies that know them, and their effect."""
    takers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for body, kind in BODIES.items():
        for name in kind.IGNORED:
            takers[name, "no effect"].append(body)
        for name, own in kind.ALIASES.items():
            takers[name, f"is `{own}`"].append(body)
        for name, values in kind.NEUTRAL.items():
            shown = "empty" if values == EMPTY else ", ".join(f"`{json.dumps(value)}`" for value in values)
            effect = "left out" if name in SAMPLERS else "refused"
            takers[name, f"{effect}, unless {shown}"].append(body)
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (name, effect), bodies in takers.items():
        rows[effect, ", ".join(bodies)].append(f"`{name}`")
    lines = [f"| {', '.join(sorted(names))} | {bodies} | {effect} |" for (effect, bodies), names in rows.items()]
    order = ("no effect", "is ", "left out", "refused")
    place = {line: next(i for i, word in enumerate(order) if f"| {word}" in line) for line in lines}
    table = ["| field | of | |", "| --- | --- | --- |", *sorted(lines, key=lambda line: (place[line], line))]
    return "\n".join([_HEADING, *table, "", _PEERS])


if __name__ == "__main__":
    print(fields_page())

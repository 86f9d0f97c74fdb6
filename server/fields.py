"""The table of other servers' fields in README.md, made from the request bodies."""

from __future__ import annotations

import json
from collections import defaultdict

from server.anthropic.types import MessagesRequest, Thinking
from server.anthropic.types import Tool as AnthropicTool
from server.http.fields import EMPTY
from server.http.generate import GenerateRequest
from server.http.wire import Body, Sampling
from server.openai.formats import StructuredOutputs
from server.openai.tokens import DetokenizeRequest
from server.openai.types import ChatRequest, CompletionRequest, Message, StreamOptions
from server.responses.types import Reasoning, ResponseRequest, TextConfig, TextFormat

BODIES: dict[str, type[Body]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
    "`/generate`": GenerateRequest,
    "`sampling_params`": Sampling,
    "`structured_outputs`": StructuredOutputs,
    "`stream_options`": StreamOptions,
    "`reasoning`": Reasoning,
    "`text`": TextConfig,
    "`text.format`": TextFormat,
    "messages": Message,
    "`/detokenize`": DetokenizeRequest,
    "`/v1/messages`": MessagesRequest,
    "its `thinking`": Thinking,
    "its `tools`": AnthropicTool,
}


def fields_table() -> str:
    """Markdown: fields, the bodies that take them, and the effect."""
    takers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for body, kind in BODIES.items():
        for name in kind.IGNORED:
            takers[name, "no effect"].append(body)
        for name, own in kind.ALIASES.items():
            takers[name, f"is `{own}`"].append(body)
        for name, values in kind.NEUTRAL.items():
            shown = "empty" if values == EMPTY else ", ".join(f"`{json.dumps(value)}`" for value in values)
            takers[name, f"refused, unless {shown}" if shown else "refused"].append(body)
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (name, effect), bodies in takers.items():
        rows[effect, ", ".join(bodies)].append(f"`{name}`")
    lines = [f"| {', '.join(sorted(names))} | {bodies} | {effect} |" for (effect, bodies), names in rows.items()]
    order = ("no effect", "is ", "refused")
    place = {line: next(i for i, word in enumerate(order) if f"| {word}" in line) for line in lines}
    return "\n".join(["| field | of | |", "| --- | --- | --- |", *sorted(lines, key=lambda line: (place[line], line))])


if __name__ == "__main__":
    print(fields_table())

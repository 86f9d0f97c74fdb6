"""Request bodies of Anthropic's routes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_BREAKPOINTS
from runtime.params import SamplingParams, StopString
from server.generation.bodies import AnswerId, GenerationBody, naming
from server.http import fields
from server.http.wire import Body, ByType, JsonObject, OneOr, Text, example
from server.openai.calls import schema_of_call
from server.openai.tools import MAX_TOOLS, Function, Tool

# Messages in a conversation, and blocks in a message.
MAX_BLOCKS = 4096

_SECONDS = {"5m": 300.0, "1h": 3600.0}


class CacheControl(Body):
    """A breakpoint: the prompt up to the end of its block is kept for this time from its last use on."""

    IGNORED = frozenset({"scope"})  # keys and cache_scope decide who shares KV

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return _SECONDS[self.ttl]


class Block(Body, extra="ignore"):
    """Base of content blocks; other fields are ignored, since clients send back servers' blocks."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text


class ThinkingBlock(Block):
    """Reasoning of an earlier answer, which the chat template may repeat. Nothing is signed here."""

    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Block):
    """Reasoning that only its author can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    """An earlier call."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject

    def plain(self) -> dict[str, Any]:
        """The chat template's dict."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


TextBlocks = OneOr[Text, Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]]


class ToolResultBlock(Block):
    """The result of an earlier call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks | None = None

    @property
    def text(self) -> str:
        """The result as one text."""
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content or ())


class PlainSource(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text


class DocumentBlock(Block):
    """A document of plain text; it stands in the prompt as text, under its title."""

    type: Literal["document"]
    source: PlainSource
    title: Text | None = None
    context: Text | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock | DocumentBlock, ByType()
]


class AnthropicMessage(Body, extra="ignore"):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: OneOr[Text, Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS)]]

    @property
    def blocks(self) -> list[Any]:
        """The content's blocks; a text is one."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(Body):
    """A tool that the client runs; Anthropic's own tools have other types, and no schema of theirs is known here."""

    IGNORED = frozenset({"allowed_callers", "eager_input_streaming", "input_examples", "strict", "defer_loading"})

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    input_schema: JsonObject
    cache_control: CacheControl | None = None

    def described(self) -> Tool:
        """The tool as chat templates and parsers of calls know it."""
        function = Function.model_construct(name=self.name, description=self.description, parameters=self.input_schema)
        return Tool.model_construct(type="function", function=function)


class ToolChoice(Body):
    """Calls that the answer may or must have."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether to reason; the chat template gets on or off."""

    IGNORED = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """Format and effort of the answer; the chat template learns of the latter."""

    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=64)] | None = None


class Edit(Body, extra="ignore"):
    """An edit of the context that the chat template makes by itself."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Body):
    """Edits of the context before it is read."""

    edits: Annotated[list[Edit], Field(max_length=16)] = Field(default_factory=list)


class MessagesPrompt(Body):
    """`POST /v1/messages/count_tokens`, and the part of `/v1/messages` that makes the prompt."""

    IGNORED = frozenset(
        {"metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id", "betas"}
    )
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {"container": ("",), "mcp_servers": ([],)}
    NAMES: ClassVar[Mapping[str, str]] = {
        **{
            "prompt": "messages",
            "max_new_tokens": "max_tokens",
            "stop": "stop_sequences",
            "breakpoints": "cache_control",
        },
        **{"json_schema": "output_config.format.schema", "continue_final_message": "messages"},
    }

    model_config = example(
        model="smollm2-135m-instruct", max_tokens=64, messages=[{"role": "user", "content": "What is a radix tree?"}]
    )

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_BLOCKS)]
    system: TextBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = Field(None, description="a breakpoint at the end of the last block")

    @property
    def num_characters(self) -> int:
        """Characters of the texts that make the prompt, about."""
        texts = [self.system] if isinstance(self.system, str) else [block.text for block in self.system or ()]
        blocks = [block for message in self.messages for block in message.blocks]
        texts += [getattr(block, "text", "") or getattr(block, "thinking", "") for block in blocks]
        return sum(map(len, texts))

    @property
    def offered(self) -> list[AnthropicTool]:
        """The tools in the prompt."""
        return [] if self.tool_choice is not None and self.tool_choice.type == "none" else self.tools or []

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not fit each other."""
        if (count := sum(1 for _ in self.breakpoints())) > MAX_BREAKPOINTS:
            raise InvalidRequest(f"{MAX_BREAKPOINTS} blocks may have cache_control, not {count}", param="cache_control")

    def breakpoints(self) -> Iterator[CacheControl]:
        """The breakpoints of all blocks, and the automatic one."""
        blocks = [block for message in self.messages for block in message.blocks]
        within = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
        texts = [text for content in (self.system, *within) if isinstance(content, list) for text in content]
        for part in (*self.offered, *texts, *blocks, self):
            if part.cache_control is not None:
                yield part.cache_control

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables


class Diagnostics(Body):
    """The earlier message of this key with whose prompt this one is compared."""

    previous_message_id: AnswerId | None = None


class MessagesRequest(MessagesPrompt, GenerationBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=0, le=1 << 20, description="0: only compute and keep the prompt")
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=1 << 20)
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(default_factory=list)
    diagnostics: Diagnostics | None = None

    @property
    def earlier(self) -> str | None:
        return None if self.diagnostics is None else self.diagnostics.previous_message_id

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    @property
    def is_constrained(self) -> bool:
        return self.must_call or (self.output_config is not None and self.output_config.format is not None)

    def check(self) -> None:
        super().check()
        if self.must_call and not self.tools:
            raise InvalidRequest("this tool_choice needs tools", param="tool_choice")
        if self.must_call and self.output_config is not None and self.output_config.format is not None:
            raise InvalidRequest("a call and a format of the answer exclude each other", param="output_config.format")

    def _schema(self) -> str | None:
        """Text of the JSON schema that the answer follows; None for any text. Raises InvalidRequest."""
        if self.must_call:
            assert self.tool_choice is not None
            wanted = self.tool_choice.name if self.tool_choice.type == "tool" else None
            tools = [tool for tool in self.offered if wanted in (None, tool.name)]
            if not tools:
                raise InvalidRequest(f"tool_choice names {wanted!r}, which is none of the tools", param="tool_choice")
            return schema_of_call([tool.described() for tool in tools])
        if self.output_config is None or self.output_config.format is None:
            return None
        return json.dumps(self.output_config.format.schema_)

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest."""
        with naming(self.NAMES):
            return SamplingParams(
                max_new_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                stop=self.stop_sequences,
                json_schema=self._schema(),
            )

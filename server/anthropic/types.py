"""Request bodies of Anthropic's routes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from runtime.params import StopString
from server.generation.bodies import AnswerId, GenerationBody
from server.http import fields
from server.http.wire import Body, ByType, JsonObject, Text, example
from server.openai.tools import MAX_TOOLS, Name

# Messages in a conversation, and blocks in a message.
MAX_BLOCKS = 4096


def _as_blocks(content: Any) -> Any:
    """A text as one block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class CacheControl(Body):
    """A breakpoint: the prompt up to the end of its block is kept for this time from its last use on."""

    IGNORED = frozenset({"scope"})  # keys and cache_scope decide who shares KV

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


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


_TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]
TextBlocks = Annotated[_TextBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _TextBlocks)]


class ToolResultBlock(Block):
    """The result of an earlier call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks | None = None


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

_Blocks = Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS)]


class AnthropicMessage(Body, extra="ignore"):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]


class AnthropicTool(Body):
    """A tool that the client runs; Anthropic's own tools have other types, and no schema of theirs is known here."""

    IGNORED = frozenset({"allowed_callers", "eager_input_streaming", "input_examples", "strict", "defer_loading"})

    type: Literal["custom"] = "custom"
    name: Name
    description: Text | None = None
    input_schema: JsonObject
    cache_control: CacheControl | None = None


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
        **{"json_schema": "output_config.format.schema", "response_format": "output_config.format.schema"},
        **{"continue_final_message": "messages"},
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

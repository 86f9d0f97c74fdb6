"""Request bodies of Anthropic's routes."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from runtime.errors import InvalidRequest
from runtime.params import StopString
from server.generation.bodies import AnswerId, GenerationBody
from server.http import fields
from server.http.body import Body, ByType, JsonObject, Named, Text, Unusable, example
from server.openai.messages import ImagePart
from server.openai.tools import MAX_TOOLS, Name

# Most messages in a conversation, and most blocks in a message.
MAX_BLOCKS = 4096


def _as_blocks(content: Any) -> Any:
    """Turn a plain string into a list with one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class CacheControl(Body):
    """A breakpoint: the prompt up to the end of this block is kept for `ttl` after each use."""

    IGNORED = frozenset({"scope"})  # keys and cache_scope decide who shares KV

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class MessageBlock(Body):
    """Base of content blocks."""

    IGNORED = fields.ANSWERED | {"citations", "is_error"}

    cache_control: CacheControl | None = None


class TextBlock(MessageBlock):
    type: Literal["text"]
    text: Text


class ThinkingBlock(MessageBlock):
    """Reasoning of an earlier answer, which the chat template may repeat. Signatures are ignored."""

    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(MessageBlock):
    """Encrypted reasoning of another server; left out of the prompt."""

    IGNORED = MessageBlock.IGNORED | {"data"}

    type: Literal["redacted_thinking"]


class ToolUseBlock(MessageBlock):
    """An earlier tool call."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject


_TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]
TextBlocks = Annotated[_TextBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _TextBlocks)]


class PlainSource(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text


class OtherSource(Unusable):
    """A document that is no plain text."""

    @property
    def data(self) -> str:
        return self.text


class DocumentBlock(MessageBlock):
    """A plain-text document. The prompt has its title, its context and its text, each on a new line."""

    type: Literal["document"]
    source: Annotated[PlainSource | OtherSource, ByType()]
    title: Text | None = None
    context: Text | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class SearchResultBlock(MessageBlock):
    """A text that was found. The prompt has its title, its source and its text, each on a new line."""

    type: Literal["search_result"]
    title: Text
    source: Text
    content: TextBlocks

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class OtherBlock(MessageBlock, Unusable):
    """A block that is no text, such as the use of a tool that Anthropic's servers run."""


class ImageBlock(MessageBlock, Unusable):
    """An image, in base64."""

    type: Literal["image"]
    source: Any = None

    @cached_property
    def part(self) -> ImagePart:
        """The image in a chat."""
        given = self.source if isinstance(self.source, dict) else {}
        data, media_type = given.get("data"), given.get("media_type")
        if isinstance(data, str) and not given.get("url"):
            return ImagePart.of_base64(data, media_type if isinstance(media_type, str) else "")
        return ImagePart(type="image", image_url=given.get("url"))

    @property
    def left_out(self) -> list[str]:
        return self.part.left_out


ReadBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock | ImageBlock | OtherBlock, ByType()]
_ReadBlocks = Annotated[list[ReadBlock], Field(max_length=MAX_BLOCKS)]


class ToolResultBlock(MessageBlock):
    """The result of an earlier tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[_ReadBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _ReadBlocks)] | None = None


ContentBlock = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | SearchResultBlock
    | ImageBlock
    | OtherBlock,
    ByType(),
]

_Blocks = Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS)]


class AnthropicMessage(Body):
    """A message of a conversation."""

    IGNORED = fields.ANSWERED

    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]


class AnthropicTool(Body):
    """A tool that the client runs."""

    IGNORED = frozenset({"allowed_callers", "eager_input_streaming", "input_examples", "strict", "defer_loading"})

    type: Literal["custom"] = "custom"
    name: Name
    description: Text | None = None
    input_schema: JsonObject
    cache_control: CacheControl | None = None


AnyTool = Annotated[AnthropicTool | Unusable, ByType()]


class ToolChoice(Body):
    """Whether the answer may or must call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether to reason. The chat template only knows on and off."""

    IGNORED = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """The answer's format, and the effort, which sets the chat template's `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=64)] | None = None


class Edit(Body, extra="ignore"):
    """An edit of the context. Chat templates leave out old reasoning (`clear_thinking`); others are not made."""

    type: Text


class ContextManagement(Body):
    """Edits of the context."""

    edits: Annotated[list[Edit], Field(max_length=16)] = Field(default_factory=list)


class Thread(Body):
    """A conversation that the server keeps under its last answer's id. One that is continued has earlier messages."""

    type: Literal["create", "continue"]
    previous_message_id: AnswerId | None = None

    @model_validator(mode="after")
    def _continues_a_message(self) -> Self:
        if (self.type == "continue") != (self.previous_message_id is not None):
            raise ValueError("a thread of type continue has previous_message_id, one of type create has none")
        return self


class MessagesPrompt(Named):
    """`POST /v1/messages/count_tokens`, and the fields of `/v1/messages` that shape the prompt."""

    IGNORED = frozenset(
        {"metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id", "betas"}
    )
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {"container": ("",), "mcp_servers": ([],)}
    NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "max_new_tokens": "max_tokens",
        "stop": "stop_sequences",
        "breakpoints": "cache_control",
        "json_schema": "output_config.format.schema",
        "response_format": "output_config.format.schema",
        "continue_final_message": "messages",
    }

    model_config = example(
        model="smollm2-135m-instruct", max_tokens=64, messages=[{"role": "user", "content": "What is a radix tree?"}]
    )

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(max_length=MAX_BLOCKS)]
    system: TextBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="an older name of output_config.format")
    thread: Thread | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = Field(None, description="a breakpoint at the end of the last block")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.messages and self.previous is None:
            raise InvalidRequest("messages: there must be at least one", param="messages")
        return self

    @property
    def previous(self) -> str | None:
        """The id of the answer whose thread the messages continue."""
        return None if self.thread is None else self.thread.previous_message_id

    @property
    def left_out(self) -> list[str]:
        """See `Named`."""
        blocks = [block for message in self.messages for block in message.content]
        blocks += [one for block in blocks if isinstance(block, ToolResultBlock) for one in block.content or ()]
        sources = [block.source for block in blocks if isinstance(block, DocumentBlock)]
        edits = self.context_management.edits if self.context_management else []
        found = super().left_out + [f"tool {tool.type}" for tool in self.tools or () if isinstance(tool, Unusable)]
        found += [what for one in (*blocks, *sources) if isinstance(one, Unusable) for what in one.left_out]
        found += [f"edit {edit.type}" for edit in edits if not edit.type.startswith("clear_thinking")]
        return list(dict.fromkeys(found))


class Diagnostics(Body):
    """An earlier message of this key; the answer explains where the two prompts differ."""

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

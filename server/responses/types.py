"""Request bodies of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from server.http import fields
from server.http.wire import Body, JsonObject, JsonText, OneOr, Text
from server.openai.caching import CacheOptions, Retention
from server.openai.tools import MAX_TOOLS, Name, kind_of_choice
from server.openai.types import MAX_MESSAGES, Message, NewTokens, SampledRequest, StreamOptions, TextPart

Id = Annotated[Text, Field(min_length=1, max_length=256)]


class ItemCall(Body):
    """An earlier call of a function."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: Id
    name: Text
    arguments: JsonText = ""


class ItemResult(Body):
    """The result of an earlier call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: Id
    output: OneOr[Text, Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]]


class ReasoningText(Body):
    """A part of the assistant's reasoning."""

    model_config = ConfigDict(extra="ignore")

    text: Text


class ItemReasoning(Body):
    """Earlier reasoning, which belongs to the assistant's item behind it; a summary is for people."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: Id


class ItemMessage(Message):
    """A message; an assistant's has the fields of its answer."""

    type: Literal["message"] = "message"


_KINDS = {"function_call": "a call", "function_call_output": "a result", "reasoning": "a thought"}


def _kind(item: Any) -> str:
    found = item.get("type") if isinstance(item, dict) else None
    # Some clients leave out the type of a reference.
    if found == "item_reference" or (found is None and isinstance(item, dict) and item.keys() == {"id"}):
        return "a reference"
    return _KINDS.get(found if isinstance(found, str) else "", "a message")


Item = Annotated[
    Annotated[ItemMessage, Tag("a message")]
    | Annotated[ItemCall, Tag("a call")]
    | Annotated[ItemResult, Tag("a result")]
    | Annotated[ItemReasoning, Tag("a thought")]
    | Annotated[ItemReference, Tag("a reference")],
    Discriminator(_kind),
]


class ItemTool(Body):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    IGNORED = frozenset({"strict", "output_schema"})
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {"defer_loading": (False,), "allowed_callers": (["direct"], [])}

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None


class ItemNamed(Body):
    """A function that a choice of tools names."""

    type: Literal["function"]
    name: Name


class ItemAllowed(Body):
    """A choice of a few tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ItemNamed], Field(min_length=1, max_length=MAX_TOOLS)]


ItemChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[ItemNamed, Tag("a tool")]
    | Annotated[ItemAllowed, Tag("some tools")],
    Discriminator(kind_of_choice),
]


class TextFormat(Body):
    """Format of the answer."""

    IGNORED = frozenset({"name", "strict", "description"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: JsonObject | None = Field(None, alias="schema")


class TextConfig(Body):
    """The form of the answer."""

    IGNORED = frozenset({"verbosity"})

    format: TextFormat | None = None


class Reasoning(Body):
    """The chat template's variable `reasoning_effort`; a summary of reasoning is never made."""

    IGNORED = frozenset({"summary", "generate_summary", "encrypted_content", "context", "mode"})

    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponseRequest(SampledRequest):
    """`POST /v1/responses`."""

    IGNORED = (SampledRequest.IGNORED | {"max_tool_calls"}) - {
        *("store", "metadata", "user", "background", "prompt_cache_key", "prompt_cache_retention")
    }
    ALIASES: ClassVar[Mapping[str, str]] = {**SampledRequest.ALIASES, "max_tokens": "max_output_tokens"}
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {
        **{"background": (False,), "conversation": fields.EMPTY, "prompt": fields.EMPTY},
        **{"context_management": fields.EMPTY, "image": fields.EMPTY, "access_programs": fields.EMPTY},
        **fields.SAMPLING,
        **fields.MODEL,
    }
    # The request's fields by those of a chat, and by the engine's parameters.
    NAMES: ClassVar[dict[str, str]] = {
        **{"messages": "input", "prompt": "input", "max_new_tokens": "max_output_tokens", "tool_choice": "tool_choice"},
        **{"json_schema": "text.format", "response_format": "text.format", "min_new_tokens": "min_tokens"},
        **{"response_format.json_schema.schema": "text.format.schema", "rid": "request_id"},
    }

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "smollm2-135m-instruct", "input": "What is a radix tree?", "max_output_tokens": 64}
        }
    )

    input: OneOr[Text, Annotated[list[Item], Field(max_length=MAX_MESSAGES)]] = Field(default_factory=list)
    instructions: Text | None = Field(None, description="a system message of this request alone")
    previous_response_id: Id | None = Field(None, description="a stored response that the input goes on with")
    store: bool = Field(True, description="keep the response for later requests, and for GET")
    max_output_tokens: NewTokens | None = None
    tools: Annotated[list[ItemTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ItemChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: Annotated[list[Text], Field(max_length=64)] = Field(
        default_factory=list, description="message.output_text.logprobs adds log-probabilities; others add nothing"
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] = "disabled"
    stream_options: StreamOptions | None = None
    metadata: JsonObject | None = None
    user: Text | None = None
    prompt_cache_key: Text | None = Field(None, description="no effect: one server finds every prefix")
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="variables of the chat template")
    enable_thinking: bool | None = Field(None, description="the chat template's variable")

    @property
    def is_prewarming(self) -> bool:
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def has_references(self) -> bool:
        return isinstance(self.input, list) and any(isinstance(item, ItemReference) for item in self.input)

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or bool(self.top_logprobs)

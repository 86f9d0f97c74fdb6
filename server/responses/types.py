"""Request bodies of `/v1/responses`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field

from server.http import fields
from server.http.body import Body, ByType, JsonObject, JsonText, OneOr, Text, Unusable, example, type_of
from server.openai.caching import CacheOptions, Retention
from server.openai.messages import MAX_MESSAGES, ImagePart, Message, TextPart
from server.openai.tools import MAX_TOOLS, CalledFunction, Function, Name, ToolCall
from server.openai.types import NewTokens, SampledRequest, StreamOptions

Id = Annotated[Text, Field(min_length=1, max_length=256)]
# Answers repeat labels and metadata, and are stored: OpenAI's bounds.
Label = Annotated[Text, Field(max_length=64)]


def _few_texts(given: dict[str, Any]) -> dict[str, str]:
    if len(given) > 16 or not all(isinstance(v, str) and len(k) <= 64 and len(v) <= 512 for k, v in given.items()):
        raise ValueError("there may be 16 texts of 512 characters, with names of 64 characters")
    return given


Metadata = Annotated[JsonObject, AfterValidator(_few_texts)]


class ItemCall(Body):
    """An earlier call. A function gets `arguments`; a custom tool gets the text `input`."""

    IGNORED = fields.ANSWERED

    type: Literal["function_call", "custom_tool_call"]
    call_id: Id
    name: Text
    namespace: Text | None = None
    arguments: JsonText | None = None
    input: Text | None = None

    def plain(self) -> ToolCall:
        """The call in a chat."""
        name = self.name if self.namespace is None else f"{self.namespace}.{self.name}"
        custom = self.type == "custom_tool_call"
        arguments = json.dumps({"input": self.input or ""}, ensure_ascii=False) if custom else self.arguments or ""
        return ToolCall(id=self.call_id, function=CalledFunction(name=name, arguments=arguments))


class ItemResult(Body):
    """The result of an earlier tool call."""

    IGNORED = fields.ANSWERED | {"name"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: OneOr[
        Text, Annotated[list[Annotated[TextPart | ImagePart | Unusable, ByType()]], Field(max_length=MAX_MESSAGES)]
    ]


class ReasoningText(Body):
    """A part of the assistant's reasoning."""

    IGNORED = fields.ANSWERED

    type: Text = "reasoning_text"
    text: Text


class ItemReasoning(Body):
    """Earlier reasoning of the assistant's next item. Summaries are ignored."""

    IGNORED = fields.ANSWERED

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


class ItemMessage(Message):
    """A message. An assistant's message may have the fields of an output item."""

    type: Literal["message"] = "message"


def _type_of(item: Any) -> Any:
    # Some clients leave out the type of a reference.
    return "item_reference" if isinstance(item, dict) and item.keys() == {"id"} else type_of(item)


# Items of tools that OpenAI's servers run, and compacted conversations, are `Unusable`.
Item = Annotated[ItemMessage | ItemCall | ItemResult | ItemReasoning | ItemReference | Unusable, ByType(_type_of)]


class ItemTool(Function):
    """A function that the model may call."""

    IGNORED = Function.IGNORED | {"output_schema"}
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {"defer_loading": (False,), "allowed_callers": (["direct"], [])}

    type: Literal["function"]


class CustomFormat(Body):
    """The form of a custom tool's input. It is described to the model, but not enforced."""

    type: Literal["text", "grammar"]
    syntax: Text | None = None
    definition: Text | None = None


class ItemCustom(Body):
    """A tool that takes a text. The model sees a function with the single argument `input`."""

    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = ItemTool.NEUTRAL

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: CustomFormat | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

    @property
    def full_description(self) -> str | None:
        """The description, with the grammar of the input."""
        if self.format is None or self.format.type == "text":
            return self.description
        form = f"input has the form of this {self.format.syntax or ''} grammar:\n{self.format.definition or ''}"
        return f"{self.description or ''}\n{form}"


class ItemNamespace(Body):
    """A group of tools. The model sees them as `namespace.tool`."""

    type: Literal["namespace"]
    name: Annotated[Text, Field(min_length=1, max_length=63)]
    description: Text | None = None
    tools: Annotated[list[Annotated[ItemTool | ItemCustom, ByType()]], Field(max_length=MAX_TOOLS)]


# Tools that only OpenAI's servers or models support are `Unusable`.
AnyTool = Annotated[ItemTool | ItemCustom | ItemNamespace | Unusable, ByType()]


class Offered(NamedTuple):
    """A tool that the model may call.

    Attributes:
        name: the tool's name in the prompt.
        description: the tool's description in the prompt.
    """

    name: str
    tool: ItemTool | ItemCustom
    description: str | None
    namespace: str | None = None


class ItemNamed(Body):
    """A tool that `tool_choice` names."""

    type: Literal["function", "custom"]
    name: Name


class ItemAllowed(Body):
    """A `tool_choice` of some tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ItemNamed], Field(min_length=1, max_length=MAX_TOOLS)]


ItemChoice = Annotated[ItemNamed | ItemAllowed | Literal["none", "auto", "required"], ByType()]


class TextFormat(Body):
    """The answer's format."""

    IGNORED = frozenset({"name", "strict", "description"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: JsonObject | None = Field(None, alias="schema")


class TextConfig(Body):
    """Options of the answer's text."""

    IGNORED = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """`effort` sets the chat template's `reasoning_effort`. Reasoning is never summarised."""

    IGNORED = frozenset({"summary", "generate_summary", "encrypted_content", "context", "mode"})

    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponseRequest(SampledRequest):
    """`POST /v1/responses`."""

    IGNORED = (SampledRequest.IGNORED | {"max_tool_calls", "client_metadata"}) - {
        "store",
        "metadata",
        "user",
        "background",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
    ALIASES: ClassVar[Mapping[str, str]] = {**SampledRequest.ALIASES, "max_tokens": "max_output_tokens"}
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {
        "background": (False,),
        "prompt": fields.EMPTY,
        "conversation": fields.EMPTY,
        "context_management": fields.EMPTY,
        "image": fields.EMPTY,
        "access_programs": fields.EMPTY,
        **fields.SAMPLING,
        **fields.MODEL,
    }
    # Maps fields of a chat and parameters of the engine to this body's fields.
    NAMES: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_new_tokens": "max_output_tokens",
        "tool_choice": "tool_choice",
        "json_schema": "text.format",
        "response_format": "text.format",
        "min_new_tokens": "min_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "rid": "request_id",
    }

    model_config = example(model="smollm2-135m-instruct", input="What is a radix tree?", max_output_tokens=64)

    input: OneOr[Text, Annotated[list[Item], Field(max_length=MAX_MESSAGES)]] = Field(default_factory=list)
    instructions: Text | None = Field(None, description="a system message for this request only")
    previous_response_id: Id | None = Field(None, description="a stored response that the input continues")
    store: bool = Field(True, description="store the response for GET and for later requests")
    max_output_tokens: NewTokens | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ItemChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    include: Annotated[list[Text], Field(max_length=64)] = Field(
        default_factory=list, description="message.output_text.logprobs adds log-probabilities; others add nothing"
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] = "disabled"
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    prompt_cache_key: Label | None = Field(None, description="no effect: every cached prefix is found")
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="variables for the chat template")
    enable_thinking: bool | None = Field(None, description="a variable for the chat template")

    @property
    def offered(self) -> list[Offered]:
        """The tools that the prompt describes."""
        found = []
        for tool in self.tools:
            if isinstance(tool, ItemNamespace):
                for i, one in enumerate(tool.tools):
                    word = None if i else tool.description  # the first tool gets the namespace's description
                    description = "\n".join(filter(None, [word, _description(one)])) or None
                    found.append(Offered(f"{tool.name}.{one.name}", one, description, tool.name))
            elif not isinstance(tool, Unusable):
                found.append(Offered(tool.name, tool, _description(tool)))
        return found

    @property
    def left_out(self) -> list[str]:
        items = self.input if isinstance(self.input, list) else []
        found = super().left_out + [f"tool {tool.type}" for tool in self.tools if isinstance(tool, Unusable)]
        return list(dict.fromkeys([*found, *(f"item {item.type}" for item in items if isinstance(item, Unusable))]))

    @property
    def is_prewarming(self) -> bool:
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def references(self) -> list[str]:
        """Ids of items of stored responses, in the order of the input."""
        items = self.input if isinstance(self.input, list) else []
        return [item.id for item in items if isinstance(item, ItemReference)]

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or bool(self.top_logprobs)


def _description(tool: ItemTool | ItemCustom) -> str | None:
    return tool.full_description if isinstance(tool, ItemCustom) else tool.description

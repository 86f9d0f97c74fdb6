"""Request bodies of the OpenAI routes."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from runtime.errors import InvalidRequest
from runtime.params import SamplingParams
from runtime.reuse.modules.pml import Import
from runtime.sampling.json_text import check_texts
from server.auth.keys import CacheScope
from server.documents.wire import GivenDocument, GivenDocuments
from server.http.wire import (
    AnswerId,
    Body,
    CacheSalt,
    Diffusion,
    Explain,
    JsonObject,
    LogitBias,
    OneOr,
    OneOrMany,
    Priority,
    Prompts,
    Reuse,
    Text,
    Timeout,
    TokenIds,
)
from server.openai.tools import MAX_TOOLS, NamedTool, Tool, ToolCall, ToolChoice, schema_of_call

# Messages in a conversation, and parts in a message.
MAX_MESSAGES = 4096

Penalty = Annotated[float, Field(ge=-2, le=2)]
NewTokens = Annotated[int, Field(ge=1, le=1 << 20)]


class StreamOptions(Body):
    """Options of a stream."""

    IGNORED = frozenset({"include_obfuscation"})

    include_usage: bool = False


class PromptCacheOptions(Body):
    """OpenAI's options of prompt caching."""

    comparison_response_id: AnswerId | None = None


class CommonRequest(Body):
    """Fields of completions and chat completions: OpenAI's, and extensions of vLLM and SGLang."""

    # Fields of the OpenAI API without meaning for one local model.
    IGNORED = frozenset(
        {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"verbosity", "reasoning_effort", "prediction"}
    )
    # The request's fields by the engine's parameters, where their names differ.
    NAMES: ClassVar[dict[str, str]] = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}

    model: str
    n: int = Field(1, ge=1, le=64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: OneOrMany[str] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    top_k: int = Field(-1, ge=-1, le=1 << 20)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=2)
    min_tokens: int = Field(0, ge=0, le=1 << 20)
    ignore_eos: bool = False
    stop_token_ids: TokenIds = Field(default_factory=list)
    skip_special_tokens: bool = True
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    cache_scope: CacheScope = "private"
    timeout_s: Timeout | None = None
    explain: Explain = False
    comparison_response_id: AnswerId | None = None
    diffusion: Diffusion | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int | None, json_schema: str | None = None) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest."""
        same = SamplingParams.model_fields.keys() & CommonRequest.model_fields.keys()
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        if self.seed is not None:
            fields["seed"] = self.seed % (1 << 63)
        try:
            fields |= {"max_new_tokens": max_new_tokens, "min_new_tokens": self.min_tokens}
            return SamplingParams(**fields, json_schema=json_schema)
        except ValidationError as error:
            problem = error.errors()[0]
            name = str(problem["loc"][0])
            param = self.NAMES.get(name, name)
            raise InvalidRequest(f"{param}: {problem['msg']}", param=param) from None


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 16}
        }
    )

    prompt: Prompts
    max_tokens: int = Field(16, ge=0, le=1 << 20, description="0 with echo: only the prompt, e.g. its logprobs")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class TextPart(Body):
    """A text part of a message's content."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: Text


def _arguments(given: dict[str, Any]) -> dict[str, str]:
    for name, text in given.items():
        if not isinstance(text, str):
            raise ValueError(f"the argument of {name!r} is no text")
    return given


class ModuleImport(Body):
    """A module of the request's schema."""

    path: Text = Field(max_length=4096, description="names from the schema on, such as plan/miami")
    args: Annotated[JsonObject, AfterValidator(_arguments)] = Field(
        default_factory=dict, description="arguments of its parameters, as texts"
    )


class ModulePart(Body):
    """An import, as a part of a message's content."""

    type: Literal["module"]
    module: ModuleImport


class DocumentPart(Body):
    """A document, as a part of a message's content."""

    type: Literal["document"]
    document: GivenDocument


_KINDS = {"text": "a text", "module": "a module", "document": "a document"}
Part = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[ModulePart, Tag("a module")]
    | Annotated[DocumentPart, Tag("a document")],
    Discriminator(lambda part: _KINDS.get(str(part.get("type")) if isinstance(part, dict) else "", "a text")),
]


class Message(Body):
    """A message of a conversation. Other fields are ignored, since clients send back servers' messages."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: OneOr[Text, Annotated[list[Part], Field(max_length=MAX_MESSAGES)]] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.documents and self.role not in ("system", "developer", "user"):
            raise ValueError(f"a message of role {self.role} holds no documents")
        return self

    def plain(self) -> dict[str, Any]:
        """The chat template's dict: role, content, tool calls or the id of the call it answers.

        The content is one string, or a list of texts and documents, if there are any.
        """
        content: Any = self.content or ""
        if isinstance(content, list):
            shown = [part for part in content if not isinstance(part, ModulePart)]
            content = [part.text if isinstance(part, TextPart) else part.document for part in shown]
            content = content if self.documents else "\n".join(content)
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [call.plain() for call in self.tool_calls]
        return turn | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})

    @property
    def documents(self) -> list[GivenDocument]:
        parts = self.content if isinstance(self.content, list) else []
        return [part.document for part in parts if isinstance(part, DocumentPart)]

    @property
    def num_characters(self) -> int:
        """Characters of the content, as far as the request holds them."""
        if not isinstance(self.content, list):
            return len(self.content or "")
        texts = sum(len(part.text) for part in self.content if isinstance(part, TextPart))
        return texts + sum(document.num_characters for document in self.documents)

    @property
    def imports(self) -> list[Import]:
        """The modules that the message imports."""
        parts = self.content if isinstance(self.content, list) else []
        modules = [part.module for part in parts if isinstance(part, ModulePart)]
        return [Import(tuple(module.path.strip("/").split("/")), module.args) for module in modules]


def _check_calls(messages: list[Message]) -> list[Message]:
    calls = [call for message in messages for call in message.tool_calls or ()]
    try:
        check_texts(call.function.arguments for call in calls)
    except ValueError as error:
        raise ValueError(f"the arguments of tool calls have {error}") from None
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_check_calls)]


class ResponseFormat(Body):
    """Format of the answer; `json_schema` holds a name and the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonObject | None = None

    def schema_text(self) -> str | None:
        """Text of the JSON schema that the answer follows; None for any text. Raises InvalidRequest."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return '{"type": "object"}'
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise InvalidRequest("json_schema needs a schema", param="response_format.json_schema.schema")
        return json.dumps(schema)


class ChatRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

    # Fields that SGLang's router sends; no supported model marks its reasoning.
    IGNORED = CommonRequest.IGNORED | {"separate_reasoning", "stream_reasoning"}
    NAMES: ClassVar[dict[str, str]] = {
        **CommonRequest.NAMES,
        **{"prompt": "messages", "pml": "messages", "json_schema": "response_format"},
    }

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": "What is a radix tree?"}],
                "max_tokens": 64,
            }
        }
    )

    messages: Messages
    schema_name: Text | None = Field(
        None, alias="schema", description="a schema that the messages follow; their parts may import its modules"
    )
    documents: GivenDocuments | None = Field(None, description="the last user message begins with these documents")
    reuse: Reuse | None = Field(None, description="of documents; default: --document-reuse")
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    prompt_cache_options: PromptCacheOptions | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None

    @property
    def num_characters(self) -> int:
        """Characters of the messages' content, as far as the request holds them."""
        return sum(part.num_characters for part in (*self.messages, *(self.documents or ())))

    @property
    def has_documents(self) -> bool:
        return bool(self.documents) or any(message.documents for message in self.messages)

    def turns(self) -> list[dict[str, Any]]:
        """The chat template's dicts of all messages, see `Message.plain`. Raises InvalidRequest."""
        turns = [message.plain() for message in self.messages]
        if self.documents:
            last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
            if last is None:
                raise InvalidRequest("documents need a message of role user", param="documents")
            said = last["content"]
            last["content"] = [*self.documents, *(said if isinstance(said, list) else [said])]
        return turns

    @property
    def earlier(self) -> str | None:
        """Id of the answer with whose prompt this one is compared."""
        options = self.prompt_cache_options
        return self.comparison_response_id or (None if options is None else options.comparison_response_id)

    @property
    def offered(self) -> list[Tool]:
        """The tools in the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def schema_text(self) -> str | None:
        """Text of the JSON schema that the answer follows; None for any text. Raises InvalidRequest."""
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            tools = [tool for tool in self.offered if tool.function.name == wanted]
            if not tools:
                raise InvalidRequest(f"tool_choice names {wanted!r}, which is none of the tools", param="tool_choice")
            return schema_of_call(tools)
        if self.must_call:
            return schema_of_call(self.offered)
        return self.response_format.schema_text() if self.response_format else None

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequest for unsupported fields, which are never ignored silently."""
        if self.schema_name is None and any(message.imports for message in self.messages):
            raise InvalidRequest("parts of type module need a schema", param="schema")
        if self.schema_name is not None and (self.reuse or self.has_documents):
            raise InvalidRequest("a schema and documents exclude each other", param="schema")
        if self.functions or self.function_call not in (None, "none", "auto"):
            raise InvalidRequest("functions are not supported; use tools", param="functions")
        if self.must_call and not self.tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if self.offered and self.response_format and self.response_format.type != "text":
            raise InvalidRequest("response_format and tools exclude each other", param="response_format")
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest("the only modality is text", param="modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")

"""Bodies of the OpenAI routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.errors import InvalidRequest
from runtime.sampling_params import SamplingParams
from server.auth import CacheScope
from server.wire import Body, CacheSalt, Diffusion, LogitBias, Priority, Text, TokenIds

Penalty = Annotated[float, Field(ge=-2, le=2)]
NewTokens = Annotated[int, Field(ge=1, le=1 << 20)]


class StreamOptions(Body):
    """What a stream tells besides text."""

    IGNORED = frozenset({"include_obfuscation"})

    include_usage: bool = False


class CommonRequest(Body):
    """What completions and chat completions share; beyond OpenAI's fields, vLLM's and SGLang's extensions."""

    # Fields of the OpenAI API that have no meaning for a server of one local model.
    IGNORED = frozenset(
        {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"parallel_tool_calls", "verbosity", "reasoning_effort", "prediction"}
    )
    # What the engine's parameters are called here, where the names differ.
    NAMES: ClassVar[dict[str, str]] = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}

    model: str
    n: int = Field(1, ge=1, le=64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    top_k: int = Field(-1, ge=-1, le=1 << 20)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    min_tokens: int = Field(0, ge=0, le=1 << 20)
    ignore_eos: bool = False
    stop_token_ids: TokenIds = Field(default_factory=list)
    skip_special_tokens: bool = True
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    cache_scope: CacheScope = "private"
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

    def sampling(self, max_new_tokens: int | None) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest."""
        same = SamplingParams.model_fields.keys() & CommonRequest.model_fields.keys()
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        if self.seed is not None:
            fields["seed"] = self.seed % (1 << 63)
        try:
            return SamplingParams(**fields, max_new_tokens=max_new_tokens, min_new_tokens=self.min_tokens)
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

    prompt: Text | list[Text] | TokenIds | list[TokenIds]
    max_tokens: NewTokens = 16
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    """A piece of text in a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A turn of a conversation. Further fields are ignored: clients send back what servers have sent them."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    def plain(self) -> dict[str, Any]:
        """What a chat template takes: the role and one string."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

    NAMES: ClassVar[dict[str, str]] = {**CommonRequest.NAMES, "prompt": "messages"}

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": "What is a radix tree?"}],
                "max_tokens": 64,
            }
        }
    )

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequest for what this server cannot do, instead of leaving it out silently."""
        if (self.response_format or {}).get("type", "text") != "text":
            raise InvalidRequest("response_format other than text is not supported", param="response_format")
        if self.tools or self.functions:
            raise InvalidRequest("tools are not supported", param="tools" if self.tools else "functions")
        if self.tool_choice not in (None, "none", "auto") or self.function_call not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools, which are not supported", param="tool_choice")
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest("the only modality is text", param="modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")

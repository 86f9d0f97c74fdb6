"""Bodies of the OpenAI routes. Unknown fields are refused; those that change nothing here are named and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.errors import InvalidRequest
from runtime.sampling_params import SamplingParams
from server.context import CacheSalt

# Fields of the OpenAI API that have no meaning for a server of one local model.
IGNORED = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "verbosity", "reasoning_effort", "prediction"),
    )
)

Stop = str | list[str] | None
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class CommonRequest(BaseModel):
    """What completions and chat completions share; beyond OpenAI's fields, vLLM's and SGLang's extensions."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int | None = Field(1, ge=1, le=64)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    stop: Stop = None
    seed: int | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: int = Field(-1, ge=-1, le=1 << 20)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    min_tokens: int = Field(0, ge=0, le=1 << 20)
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    cache_salt: CacheSalt = None

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if k not in IGNORED} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    def sampling(self, max_new_tokens: int | None) -> SamplingParams:
        """The sampling parameters. A null means the default, as with OpenAI. Raises InvalidRequest."""
        fields: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": self.min_tokens,
            "n": self.n or 1,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": self.stop,
            "seed": None if self.seed is None else self.seed % (1 << 63),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": self.logit_bias or {},
            "stop_token_ids": self.stop_token_ids,
        }
        for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos", "skip_special_tokens"):
            fields[name] = getattr(self, name)
        try:
            return SamplingParams(**fields)
        except ValueError as error:
            problem = error.errors()[0]  # type: ignore[attr-defined]
            param = str(problem["loc"][0]) if problem["loc"] else None
            raise InvalidRequest(f"{param}: {problem['msg']}", param=param) from None


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 16}
        }
    )

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1, le=1 << 20)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    """A piece of text in a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """What a chat template takes: the role and one string."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

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
    max_tokens: int | None = Field(None, ge=1, le=1 << 20)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 20)
    logprobs: bool | None = False
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

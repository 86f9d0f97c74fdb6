"""Request bodies of the OpenAI routes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from runtime.errors import InvalidRequest
from runtime.params import CONSTRAINTS, MAX_SCHEMA, CommonSampling, SamplingParams, no_seed
from server.auth.keys import Tenant
from server.features.parts import FeaturePart
from server.features.registry import ChatFields
from server.generation.bodies import AnswerId, GenerationBody, LogitBias, Reuse, naming
from server.http import fields
from server.http.body import Body, JsonObject, OneOrMany, Prompts, Rid, Text, TokenIds, Unusable, example
from server.openai.caching import CacheOptions, Mark, Retention, unmarked
from server.openai.dialects.parameters import Parameters
from server.openai.formats import Constrained, Constraint, ResponseFormat, StructuredOutputs, only
from server.openai.messages import Messages
from server.openai.names import safe_names
from server.openai.thinking import in_own_fields
from server.openai.tools import MAX_TOOLS, AllowedTools, AnyTool, NamedTool, Tool, ToolChoice

NewTokens = Annotated[int, Field(ge=-1, le=1 << 20, description="-1: as many as fit; 0: only compute the prompt")]


class StreamOptions(Body):
    """Options of a stream."""

    IGNORED = frozenset({"include_obfuscation", "continuous_usage_stats"})

    include_usage: bool = False


class SampledRequest(GenerationBody, CommonSampling):
    """Fields that OpenAI's three routes share: sampling, the request's id and others."""

    IGNORED = fields.OPERATION | fields.OPENAI
    ALIASES: ClassVar[Mapping[str, str]] = fields.SAMPLING_ALIASES | fields.REQUEST_ALIASES

    stop: Annotated[OneOrMany[str] | None, AfterValidator(lambda stop: stop or None)] = None
    seed: Annotated[int | None, BeforeValidator(no_seed)] = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: LogitBias = Field(default_factory=dict)
    min_tokens: int = Field(0, ge=0, le=1 << 20)
    stop_token_ids: TokenIds = Field(default_factory=list)
    request_id: Rid | None = None
    comparison_response_id: AnswerId | None = None

    @property
    def earlier(self) -> str | None:
        options: CacheOptions | None = getattr(self, "prompt_cache_options", None)  # of chats and responses
        return self.comparison_response_id or (options.comparison_response_id if options else None)


class CommonRequest(SampledRequest, Constrained):
    """Fields of completions and chat completions: OpenAI's, and extensions of vLLM and SGLang."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **SampledRequest.ALIASES,
        **fields.FORMAT_ALIASES,
        **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    }
    NAMES: ClassVar[Mapping[str, str]] = {
        "min_new_tokens": "min_tokens",
        "max_new_tokens": "max_tokens",
        "last_tokens": "truncate_prompt_tokens",
        "rid": "request_id",
        "prompt_logprobs_from": "prompt_logprobs",
    }

    n: int = Field(1, ge=1, le=64)
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="vLLM's: report each prompt token, and so many of the most likely ones beside it"
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=1 << 20, description="keep only this many last tokens of the prompt; -1: as many as fit"
    )
    add_special_tokens: bool = False
    reuse: Reuse | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _whole_answers_have_logprobs_of_prompts(self) -> CommonRequest:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs needs stream: false", param="prompt_logprobs")
        return self

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event for the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def constraints(self) -> list[Constraint]:
        """All constraints on the answer's format. Raises InvalidRequest."""
        wanted = self.response_format.constraint() if self.response_format else {}
        other = self.structured_outputs.constraints() if self.structured_outputs else []
        return super().constraints() + ([wanted] if wanted else []) + other

    def sampling(self, max_new_tokens: int | None, constraint: Constraint) -> SamplingParams:
        """The sampling parameters; `max_new_tokens` of -1 means as many as fit. Raises InvalidRequest."""
        same = SamplingParams.model_fields.keys() & CommonRequest.model_fields.keys() - {*CONSTRAINTS}
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given |= {"max_new_tokens": None if max_new_tokens == -1 else max_new_tokens, **constraint}
        given |= {"min_new_tokens": self.min_tokens, "seed": None if self.seed is None else self.seed % (1 << 63)}
        with naming(self.NAMES):
            return SamplingParams(**given)

    def parameters(self, tenant: Tenant) -> dict[str, Any]:
        return super().parameters(tenant) | {
            "add_special_tokens": self.add_special_tokens,
            "reuse": self.reuse,
            "last_tokens": self.truncate_prompt_tokens,
            "show_tokens": self.return_token_ids,
            "prompt_logprobs_from": None if self.prompt_logprobs is None else 0,
        }

    def most_top(self, wanted: int | None) -> int | None:
        """The number of alternatives that the engine reports, if `wanted` are for output tokens; None: none at all."""
        return max((count for count in (wanted, self.prompt_logprobs) if count is not None), default=None)


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`."""

    ALIASES: ClassVar[Mapping[str, str]] = {**CommonRequest.ALIASES, "n_probs": "logprobs"}

    model_config = example(model="smollm2-135m-instruct", prompt="The capital of France is", max_tokens=16)

    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = fields.SAMPLING | fields.MODEL | fields.COMPLETION

    prompt: Prompts
    max_tokens: NewTokens = 16
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: Text | None = Field(None, description="the answer stands between prompt and suffix; texts alone")
    best_of: int | None = None
    add_special_tokens: bool = Field(True, description="begin a text with the model's BOS token, if it has one")


class ChatRequest(CommonRequest, ChatFields):
    """`POST /v1/chat/completions`."""

    IGNORED = CommonRequest.IGNORED - {
        "prompt_cache_retention",
        "return_progress",
        "separate_reasoning",
        "include_reasoning",
        "reasoning_format",
    }
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = fields.SAMPLING | fields.MODEL | fields.CHAT
    NAMES: ClassVar[Mapping[str, str]] = {
        **CommonRequest.NAMES,
        "prompt": "messages",
        **ChatFields.NAMES,
        "json_schema": "response_format",
    }

    model_config = example(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "What is a radix tree?"}], max_tokens=64
    )

    messages: Messages
    n_probs: int | None = Field(None, ge=0, le=20, description="llama.cpp's: log-probabilities with so many others")
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="the answer continues the last message's text")
    add_special_tokens: bool = Field(False, description="rarely needed: chat templates write special tokens")
    chat_template_kwargs: JsonObject | None = Field(None, description="variables for the chat template")
    enable_thinking: bool | None = Field(None, description="a variable for the chat template")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="a variable for the chat template; `none` also sets enable_thinking to false"
    )
    separate_reasoning: bool = Field(True, description="answer the reasoning as `reasoning_content`, not in the text")
    include_reasoning: bool = Field(True, description="whether the answer has the separated reasoning")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    web_search_options: JsonObject | None = Field(None, description="left out: the model cannot search the web")
    return_progress: bool = Field(False, description="a stream reports how much of the prompt is computed")

    _seen_names: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_others(cls, given: Any) -> Any:
        return in_own_fields(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _name_tools(self) -> ChatRequest:
        """Give tools the names that the model sees, see `safe_names`."""
        tools = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        if seen := safe_names(tool.function.name for tool in tools):
            self._seen_names = seen
            self.tools = [tool.renamed(seen) if isinstance(tool, Tool) else tool for tool in self.tools or ()]
            if isinstance(self.tool_choice, NamedTool | AllowedTools):
                self.tool_choice = self.tool_choice.renamed(seen)
        return self

    @property
    def given_names(self) -> dict[str, str]:
        """The names that the request gave to tools which the model sees under other names."""
        return {seen: given for given, seen in self._seen_names.items()}

    @model_validator(mode="after")
    def _log_probabilities(self) -> ChatRequest:
        if self.n_probs is not None:
            self.logprobs, self.top_logprobs = True, self.n_probs
        return self

    @property
    def left_out(self) -> list[str]:
        found = super().left_out + [what for message in self.messages for what in message.left_out]
        found += [f"tool {tool.type}" for tool in self.tools or () if isinstance(tool, Unusable)]
        found += ["web_search_options"] if self.web_search_options is not None else []
        return list(dict.fromkeys(found))

    @property
    def num_characters(self) -> int:
        """The number of characters in the messages' content, without what is stored."""
        return sum(message.num_characters for message in self.messages) + self.characters_of_fields

    @property
    def parts(self) -> list[FeaturePart]:
        """What features put into the messages."""
        return [part for message in self.messages for part in message.parts]

    def turns(self, mark: Mark = unmarked) -> list[dict[str, Any]]:
        """All messages as dicts for the chat template, see `Message.plain`. Raises InvalidRequest."""
        turns = [message.plain(mark) for message in self.messages]
        if seen := self._seen_names:
            for function in (call["function"] for turn in turns for call in turn.get("tool_calls", ())):
                function["name"] = seen.get(function["name"], function["name"])
        self.add_parts(turns)
        return turns

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as fit."""
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            return 0
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_variables(self) -> dict[str, Any]:
        """The variables for the chat template."""
        given = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        variables = {name: value for name, value in given.items() if value is not None}
        if self.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
        return variables | (self.chat_template_kwargs or {})

    @property
    def offered(self) -> list[Tool]:
        """The tools that the prompt describes."""
        usable = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        return [] if self.tool_choice == "none" else usable

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def names(self) -> Mapping[str, str]:
        return {**super().names, "json_schema": "tools"} if self.must_call else super().names

    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call: those in the prompt, or in `tool_choice`. Raises InvalidRequest."""
        if not isinstance(self.tool_choice, NamedTool | AllowedTools):
            return self.offered
        names = self.tool_choice.names
        if unknown := names - {tool.function.name for tool in self.offered}:
            message = f"tool_choice names {min(unknown)!r}, which is not in tools"
            raise InvalidRequest(message, param="tool_choice")
        return [tool for tool in self.offered if tool.function.name in names]

    @cached_property
    def parameters_of_tools(self) -> Mapping[str, Parameters]:
        """The parameters of the tools that the answer may call, by name, for all choices. Raises InvalidRequest."""
        return {tool.function.name: Parameters(tool.schema_of_arguments()) for tool in self.callable_tools()}

    def constraint(self) -> Constraint:
        """The constraint on the answer. Raises InvalidRequest."""
        tools = self.callable_tools()
        if self.must_call:
            from server.openai.call_grammars import schema_of_any_call, schema_of_call

            schema = schema_of_call(tools)
            return {"json_schema": schema if len(schema) <= MAX_SCHEMA else json.dumps(schema_of_any_call(tools))}
        return only(self.constraints())

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequest for combinations of fields that are not supported."""
        self.check_parts(self.parts, bool(self.template_variables()) or self.truncate_prompt_tokens is not None)
        if self.must_call and not self.offered:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if self.offered and "json_schema" not in only(self.constraints()) and self.constraints():
            message = "tools and a regular expression or a grammar exclude each other; a JSON schema is possible"
            raise InvalidRequest(message, param="response_format")
        if self.continue_final_message:
            self._check_continued()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")

    def _check_continued(self) -> None:
        if self.has_parts(self.parts):
            raise InvalidRequest(f"messages with {self.PARTS} are not continued", param="continue_final_message")
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequest(message, param="continue_final_message")

"""Sampling and reuse parameters of a request, for HTTP, the offline engine and the engine process."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from runtime.errors import InvalidRequest

DocumentMethod = Literal["none", "a3", "cacheblend", "prophetkv", "passages", "legolink", "pie", "full"]

# Fields of `SamplingParams` that constrain the output; they exclude each other.
CONSTRAINTS = ("json_schema", "regex", "grammar")

# Below this temperature the most likely token is certain.
_LEAST_TEMPERATURE = 1e-4

# Most characters of a JSON schema.
MAX_SCHEMA = 1 << 16

StopString = Annotated[str, Field(min_length=1, max_length=1024)]

# Defaults of `ReuseParams`: the share of the rows to recompute, and LegoLink's first rows of each chunk.
RATIO, LEADING = 0.15, 16
# Options of `ReuseParams` that only some methods take, with these methods.
TAKEN_BY = {
    "ratio": ("a3", "cacheblend", "prophetkv", "passages", "legolink"),
    **{"k": ("legolink",), "max_kl": ("auto",)},
}


def no_seed(given: object) -> object:
    """None for -1, by which other servers' clients ask for a new seed each time."""
    return None if given == -1 and not isinstance(given, bool) else given


class Lazy(BaseModel):
    """Where a grammar applies, if not to the whole output. The grammar must match the triggers as well."""

    model_config = ConfigDict(extra="forbid")

    triggers: list[StopString] = Field(
        default_factory=list, max_length=512, description="texts from which the output follows the grammar to its end"
    )
    starts: list[StopString] = Field(
        default_factory=list,
        max_length=512,
        description="texts without white space with which the output may begin; it then follows the grammar as a whole",
    )
    to_end: bool = Field(False, description="from the first trigger on to the output's end")


class CommonSampling(BaseModel):
    """Sampling parameters that have the same name in most APIs."""

    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=1 << 20, description="-1 or 0: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="counts output tokens")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="counts output tokens")
    repetition_penalty: float = Field(1.0, ge=0.01, le=2, description="applies to prompt and output tokens")
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, max_length=1 << 18, description="the output has these tokens alone; empty: any"
    )
    bad_words: list[StopString] = Field(
        default_factory=list, max_length=256, description="words that the output does not contain"
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    no_stop_trim: bool = Field(False, description="keep the stop string in the text")


class SamplingParams(CommonSampling):
    """Sampling parameters, with SGLang's names and defaults."""

    model_config = ConfigDict(extra="forbid", strict=False)

    max_new_tokens: int | None = Field(
        128, ge=0, le=1 << 20, description="most tokens to generate; null: as many as the context holds"
    )
    min_new_tokens: int = Field(
        0, ge=0, le=1 << 20, description="least tokens before an end of sequence or a stop string"
    )
    seed: Annotated[int | None, BeforeValidator(no_seed)] = Field(
        None, ge=0, lt=1 << 63, description="the same seed and request give the same tokens; null or -1: a new one"
    )
    stop: list[StopString] = Field(default_factory=list, max_length=16, description="strings that end the generation")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    n: int = Field(1, ge=1, le=64, description="completions of the prompt")
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    json_schema: str | None = Field(
        None, min_length=2, max_length=MAX_SCHEMA, description="JSON schema, as text, for the output"
    )
    regex: str | None = Field(
        None, min_length=1, max_length=1 << 13, description="regular expression for the whole output"
    )
    grammar: str | None = Field(
        None, min_length=1, max_length=1 << 16, description="EBNF (GBNF) or Lark grammar for the whole output"
    )
    lazy: Lazy | None = Field(None, description="the grammar, schema or expression holds for parts of the output alone")

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value is None or value == "":
            return []
        return [value] if isinstance(value, str | int) else value

    @property
    def constrained(self) -> bool:
        """Whether the output follows a grammar."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def constraint(self) -> str | None:
        """The field that constrains the output, if one does."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @cached_property
    def takes_best(self) -> bool:
        """Whether every token is the argmax of the model's unchanged logits."""
        changed = bool(self.logit_bias) or self.penalised or self.min_new_tokens > 0 or self.constrained
        return self.greedy and not (changed or self.limited)

    @property
    def limited(self) -> bool:
        """Whether the output may not have some tokens."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def penalised(self) -> bool:
        """Whether a penalty depends on earlier tokens."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def divisor(self) -> float:
        """The divisor of the logits: the temperature, but large enough for quotients in float32."""
        return max(self.temperature, _LEAST_TEMPERATURE)

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a value does not fit the model or another value."""
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other", param=given[1])
        if self.lazy is not None and not given:
            raise InvalidRequest("lazy needs a grammar, a schema or an expression", param="lazy")
        if self.lazy is not None and not (self.lazy.triggers or self.lazy.starts):
            raise InvalidRequest("lazy needs triggers or starts", param="lazy")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}",
                param="min_new_tokens",
            )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids = getattr(self, name)
            if bad := next((i for i in ids if not 0 <= i < vocab_size), None):
                raise InvalidRequest(f"token id {bad} is out of range: the model has {vocab_size} tokens", param=name)


class Reuse(BaseModel):
    """How a request reuses KV beyond exact prefixes; each method has its own parameters."""

    model_config = ConfigDict(extra="forbid", strict=False)

    method: str

    def check(self) -> None:
        """Raise InvalidRequest if an option does not go with the method or another option."""
        raise NotImplementedError


class ReuseParams(Reuse):
    """Reuse of documents' KV at any position of a prompt, with a few of the documents' rows computed again."""

    method: Literal[DocumentMethod, "auto"] = Field(
        description="selects the rows; none: an ordinary prompt; auto: by the model's table"
    )
    ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"share of the documents' rows (A3's paper: of all) to recompute; default: {RATIO}",
    )
    granularity: Literal["page", "token"] = Field(
        "token", description="rows are selected one by one, or by whole pages"
    )
    chunk_tokens: int = Field(512, ge=16, le=4096, description="documents are encoded in chunks of this many tokens")
    k: int | None = Field(None, ge=0, le=512, description=f"legolink: first rows of each chunk; default: {LEADING}")
    max_kl: float | None = Field(
        None, ge=0, le=100, description="auto: choose by this largest mean KL to full prefill, in nats"
    )

    def check(self) -> None:
        for name, methods in TAKEN_BY.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise InvalidRequest(f"{name} is an option of {', '.join(methods)}", param=f"reuse.{name}")
        for name in ("granularity", "chunk_tokens") if self.method == "auto" else ():
            if name in self.model_fields_set:
                raise InvalidRequest(f"auto takes the {name} that was measured; leave it out", param=f"reuse.{name}")
        if self.k is not None and self.ratio is not None:
            raise InvalidRequest("k and ratio exclude each other", param="reuse.k")

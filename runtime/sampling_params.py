"""How a request wants its tokens chosen: one definition for HTTP, the offline engine and the engine process."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from runtime.errors import InvalidRequest

StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class SamplingParams(BaseModel):
    """Sampling parameters, with SGLang's names and defaults."""

    model_config = ConfigDict(extra="forbid", strict=False)

    max_new_tokens: int | None = Field(
        128, ge=0, le=1 << 20, description="most tokens to generate; null: as many as the context holds"
    )
    min_new_tokens: int = Field(0, ge=0, le=1 << 20, description="no end of sequence or stop before that many")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=1 << 20, description="-1 or 0: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="counts output tokens")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="counts output tokens")
    repetition_penalty: float = Field(1.0, ge=0.01, le=2, description="of prompt and output tokens")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="the same seed and request give the same tokens")
    stop: list[StopString] = Field(default_factory=list, max_length=16, description="generation ends before these")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=64, description="completions of the one prompt")
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    json_schema: str | None = Field(
        None, min_length=2, max_length=1 << 16, description="text of a JSON schema that the output follows"
    )
    regex: str | None = Field(
        None, min_length=1, max_length=1 << 13, description="regular expression that the whole output matches"
    )
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    no_stop_trim: bool = Field(False, description="keep the stop string in the text")

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value is None:
            return []
        return [value] if isinstance(value, str | int) else value

    @property
    def constrained(self) -> bool:
        """Whether the output follows a grammar."""
        return self.json_schema is not None or self.regex is not None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` where a value does not fit the model, or another value."""
        if self.json_schema is not None and self.regex is not None:
            raise InvalidRequest("json_schema and regex cannot both be followed", param="regex")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}",
                param="min_new_tokens",
            )
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if bad := next((i for i in ids if not 0 <= i < vocab_size), None):
                raise InvalidRequest(f"token id {bad} is out of range: the model has {vocab_size} tokens", param=name)

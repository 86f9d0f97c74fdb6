"""Request bodies: their base class and the types of their fields.

One rule for all routes: an unknown field is refused, unless it is null or false (clients send fields that they do not
use) or in the body's `IGNORED`. Null means the default. Types are strict: no number in a string, no `true` for 1.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from runtime.params import DiffusionParams, SamplingParams
from runtime.sampling.json_text import check_unicode

# Prompts in one request.
MAX_BATCH = 1024


class Body(BaseModel):
    """Base of request bodies.

    Attributes:
        IGNORED: fields that are accepted and have no effect.
        NULL_COUNTS: fields for which null is a value of its own.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NULL_COUNTS: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if cls._is_used(k, v)} if isinstance(data, dict) else data

    @classmethod
    def _is_used(cls, name: str, value: Any) -> bool:
        if value is None:
            return name in cls.NULL_COUNTS
        return name in cls.model_fields or (value is not False and name not in cls.IGNORED)


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not Unicode text") from None
    return text


def _with_int_keys(value: Any) -> Any:
    """A dict with its decimal keys as integers, which JSON lacks; validation refuses the others."""
    if not isinstance(value, dict):
        return value
    return {int(k) if isinstance(k, str) and k.isascii() and k[:20].isdigit() else k: v for k, v in value.items()}


def _unicode_within(value: dict[str, Any]) -> dict[str, Any]:
    check_unicode(value)
    return value


Text = Annotated[str, AfterValidator(_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_unicode_within)]
TokenIds = list[Annotated[int, Field(ge=0)]]
Rid = Annotated[str, Field(min_length=1, max_length=256)]
CacheSalt = Annotated[
    str, Field(min_length=1, max_length=256, description="requests with different salts never share cached pages")
]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31, description="larger goes first among waiting requests")]
Timeout = Annotated[float, Field(gt=0, le=86_400, description="seconds until the request fails with 408")]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_with_int_keys), Field(max_length=1024)
]


class Sampling(Body, SamplingParams):
    """`SamplingParams` in a request."""

    model_config = ConfigDict(strict=True)
    IGNORED = frozenset({"spaces_between_special_tokens"})
    NULL_COUNTS = frozenset({"max_new_tokens"})

    sampling_seed: int | None = Field(None, ge=0, lt=1 << 63, description="SGLang's name for seed")
    logit_bias: LogitBias = Field(default_factory=dict)

    def plain(self) -> SamplingParams:
        """The parameters by the engine's names."""
        fields = {name: getattr(self, name) for name in SamplingParams.model_fields}
        if self.sampling_seed is not None:
            fields["seed"] = self.sampling_seed
        return SamplingParams.model_construct(**fields)


class Diffusion(Body, DiffusionParams):
    """`DiffusionParams` in a request."""

    model_config = ConfigDict(strict=True)

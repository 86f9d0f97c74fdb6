"""Request bodies: their base class and the types of their fields.

One rule for all routes: an unknown field is refused, unless it is null or false (clients send fields that they do not
use) or in the body's `IGNORED`. Null means the default. Types are strict: no number in a string, no `true` for 1.

Validation ends at the first error of a list, and tries one branch of a union: a megabyte of errors costs a gigabyte.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from runtime.params import DiffusionParams, ReuseParams, SamplingParams
from runtime.sampling.json_text import check_unicode

# Prompts in one request.
MAX_BATCH = 1024
MAX_BIASES = 1024
# Branches of unions in locations of errors, where `errors.py` leaves them out: they are no identifiers.
_ONE, _MANY, _TEXTS, _IDS = "one of them", "a list", "as text", "as ids"

T = TypeVar("T")
Many = TypeVar("Many")


def _bound(schema: Any, owner: str) -> None:
    """End the validation of each list at its first error. Raises TypeError for lists of any length but those of ids."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            if schema["items_schema"]["type"] != "int" and "max_length" not in schema:
                raise TypeError(f"{owner} has a list without max_length")
        for part in schema.values():
            _bound(part, owner)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _bound(part, owner)


class Body(BaseModel):
    """Base of request bodies.

    Attributes:
        IGNORED: fields that are accepted and have no effect.
        NULL_COUNTS: fields for which null is a value of its own.
        KNOWN: the fields, by their names in JSON.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NULL_COUNTS: ClassVar[frozenset[str]] = frozenset()

    KNOWN: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.KNOWN = frozenset(info.alias or name for name, info in cls.__pydantic_fields__.items())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(schema, cls.__name__)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, data: Any) -> Any:
        """The known fields, and the first unknown one, which is refused."""
        fields = cls.KNOWN
        if not isinstance(data, dict) or (data.keys() <= fields and None not in data.values()):
            return data
        known = {name: data[name] for name in fields if name in data}
        used = {name: value for name, value in known.items() if value is not None or name in cls.NULL_COUNTS}
        unknown = (item for item in data.items() if item[0] not in known and cls._counts(*item))
        return used | dict(islice(unknown, 1))

    @classmethod
    def _counts(cls, name: str, value: Any) -> bool:
        return value is not None and value is not False and name not in cls.IGNORED


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
    if len(value) > MAX_BIASES:
        raise ValueError(f"there may be {MAX_BIASES} biases, not {len(value)}")
    return {int(k) if isinstance(k, str) and k.isascii() and k[:20].isdigit() else k: v for k, v in value.items()}


def _unicode_within(value: dict[str, Any]) -> dict[str, Any]:
    check_unicode(value)
    return value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


Text = Annotated[str, AfterValidator(_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_unicode_within)]
TokenIds = list[Annotated[int, Field(ge=0)]]
# One or a list; the latter of up to MAX_BATCH.
OneOr = Annotated[
    Annotated[T, Tag(_ONE)] | Annotated[Many, Tag(_MANY)],
    Discriminator(lambda value: _MANY if isinstance(value, list) else _ONE),
]
OneOrMany = OneOr[T, Annotated[list[T], Field(max_length=MAX_BATCH)]]
# One prompt that is a list, or a list of such prompts.
OneOrLists = Annotated[
    Annotated[T, Tag(_ONE)] | Annotated[list[T], Field(max_length=MAX_BATCH), Tag(_MANY)],
    Discriminator(lambda value: _MANY if isinstance(_first(value), list) else _ONE),
]
IdPrompts = OneOrLists[TokenIds]
# Prompts as texts or token ids.
Prompts = Annotated[
    Annotated[OneOrMany[Text], Tag(_TEXTS)] | Annotated[IdPrompts, Tag(_IDS)],
    Discriminator(lambda value: _IDS if isinstance(_first(value), int | list) else _TEXTS),
]
Rid = Annotated[str, Field(min_length=1, max_length=256)]
CacheSalt = Annotated[
    str, Field(min_length=1, max_length=256, description="requests with different salts never share cached pages")
]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31, description="larger goes first among waiting requests")]
Timeout = Annotated[float, Field(gt=0, le=86_400, description="seconds until the request fails with 408")]
Explain = Annotated[bool, Field(description="the answer tells why its prompt was not read from the cache")]
AnswerId = Annotated[
    str, Field(min_length=1, max_length=256, description="an earlier answer of this key, whose prompt is compared")
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), BeforeValidator(_with_int_keys)
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


class Reuse(Body, ReuseParams):
    """`ReuseParams` in a request."""

    model_config = ConfigDict(strict=True)

"""Request bodies: their base class and the types of their fields.

One rule for all routes: an unknown field is refused, unless it is null (clients send fields that they do not use). A
body lists the fields of other servers: those that change nothing here, those that have another name here, and those
that are refused unless they ask for nothing. Null means the default. Types are strict: no number in a string, no `true`
for 1; but 1.0 is 1.

Validation ends at the first error of a list, and tries one branch of a union: a megabyte of errors costs a gigabyte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from runtime.errors import InvalidRequest
from runtime.params import DiffusionParams, DocumentMethod, ReasoningParams, ReuseParams, SamplingParams
from runtime.sampling.json_text import check_unicode
from server.auth.keys import CacheScope
from server.http import fields

# Prompts in one request.
MAX_BATCH = 1024
MAX_BIASES = 1024
# Branches of unions in locations of errors, where `errors.py` leaves them out: they are no identifiers.
_ONE, _MANY, _TEXTS, _IDS = "one of them", "a list", "as text", "as ids"
_DOCUMENTS, _REASONING = "of documents", "of reasoning"

T = TypeVar("T")
Many = TypeVar("Many")


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bound(schema: Any, owner: str) -> Any:
    """A schema that ends each list at its first error, and takes 1.0 for 1 outside of lists of ids.

    Raises TypeError for lists of any length but those of ids.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_bound(part, owner) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "int":
        return no_info_before_validator_function(_integral, schema)
    if kind == "list":
        schema["fail_fast"] = True
        if schema["items_schema"]["type"] == "int":  # to ask for each of them would cost more than to read them
            return schema
        if "max_length" not in schema:
            raise TypeError(f"{owner} has a list without max_length")
    if kind == "function-before" and schema["function"].get("function") is _integral:
        return schema  # of a body within this one
    return {name: part if name == "keys_schema" else _bound(part, owner) for name, part in schema.items()}


class Body(BaseModel):
    """Base of request bodies.

    Attributes:
        IGNORED: fields that change nothing here.
        ALIASES: other servers' names of fields.
        NEUTRAL: fields that are not supported, and the values of theirs that change nothing.
        NULL_COUNTS: fields for which null is a value of its own.
        KNOWN: the fields, by their names in JSON.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    ALIASES: ClassVar[Mapping[str, str]] = {}
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    NULL_COUNTS: ClassVar[frozenset[str]] = frozenset()

    KNOWN: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.KNOWN = frozenset(info.alias or name for name, info in cls.__pydantic_fields__.items())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _bound(handler(source), cls.__name__)

    @model_validator(mode="before")
    @classmethod
    def _by_own_names(cls, data: Any) -> Any:
        """The fields by their own names, and the first unknown one, which is refused. Raises InvalidRequest."""
        own_names = cls.KNOWN
        if not isinstance(data, dict) or (data.keys() <= own_names and None not in data.values()):
            return data
        known = {name: data[name] for name in own_names if name in data}
        used = {name: value for name, value in known.items() if value is not None or name in cls.NULL_COUNTS}
        for name, value in data.items():
            if name in own_names or name in cls.IGNORED or value is None:
                continue
            if name in cls.NEUTRAL:
                if not any(value == neutral for neutral in cls.NEUTRAL[name]):
                    raise InvalidRequest(f"{name} is not supported{fields.INSTEAD.get(name, '')}", param=name)
            elif (own := cls.ALIASES.get(name)) is None:
                if meant := get_close_matches(name, own_names, 1):
                    told = {"field": name, "meant": meant[0]}
                    raise PydanticCustomError("extra_forbidden", "unknown field {field}; did you mean {meant}?", told)
                return used | {name: value}
            elif used.setdefault(own, value) is not value and used[own] != value:
                raise InvalidRequest(f"{name} and {own} are the same field, with two values", param=name)
        return used


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


def _written(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


_METHODS = (*get_args(DocumentMethod), "auto", "reasoncache")


def _method(value: Any) -> Any:
    return value.get("method") if isinstance(value, dict) else getattr(value, "method", None)


Text = Annotated[str, AfterValidator(_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_unicode_within)]
# The text of a JSON object, which may also come as the object itself.
JsonText = Annotated[
    str, BeforeValidator(_written, json_schema_input_type=str | dict[str, Any]), AfterValidator(_unicode)
]
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


def example(**fields: Any) -> ConfigDict:
    """The `model_config` of a body with an example for readers of the API."""
    return ConfigDict(json_schema_extra={"example": fields})


class CacheUse(Body):
    """The use of the prefix cache by one request."""

    store: bool = Field(True, description="false: nothing that the request computes outlives it, in any tier")


class OwnFields(Body):
    """Ramet's own fields of every route that generates: how urgent a request is, and how it uses the cache."""

    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    cache_scope: CacheScope = "private"
    cache: CacheUse = Field(default_factory=CacheUse)
    timeout_s: Timeout | None = None
    explain: Explain = False


class Sampling(Body, SamplingParams, strict=True):
    """`SamplingParams` in a request."""

    IGNORED = fields.OPERATION
    ALIASES: ClassVar[Mapping[str, str]] = {
        **fields.SAMPLING_ALIASES,
        **{"sampling_seed": "seed", "ebnf": "grammar"},
    }
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = fields.SAMPLING
    NULL_COUNTS = frozenset({"max_new_tokens"})

    logit_bias: LogitBias = Field(default_factory=dict)

    def plain(self) -> SamplingParams:
        """The parameters by the engine's names."""
        return SamplingParams.model_construct(**{name: getattr(self, name) for name in SamplingParams.model_fields})


class Diffusion(Body, DiffusionParams, strict=True):
    """`DiffusionParams` in a request."""


class DocumentReuse(Body, ReuseParams, strict=True):
    """`ReuseParams` in a request."""

    @field_validator("method", mode="before")
    @classmethod
    def _is_known(cls, method: Any) -> Any:
        """An unknown method is told all that there are, also reasoncache's."""
        if method not in _METHODS:
            raise PydanticCustomError("literal_error", "Input should be {one}", {"one": " or ".join(_METHODS)})
        return method


class ReasoningReuse(Body, ReasoningParams, strict=True):
    """`ReasoningParams` in a request."""


Reuse = Annotated[
    Annotated[DocumentReuse, Tag(_DOCUMENTS)] | Annotated[ReasoningReuse, Tag(_REASONING)],
    Discriminator(lambda value: _REASONING if _method(value) == "reasoncache" else _DOCUMENTS),
]

"""Request bodies: their base class and the types of their fields.

The rules are the same for all routes. Null means the default, because clients send null for fields that they do not
use. A body lists the known fields of other servers: those without effect, aliases, and unsupported fields with their
accepted values. `unknown_fields.py` has the rule for all others. Where an answer cannot name them (`Named`), all are
refused. Types are strict: a string is no number and `true` is not 1, but 1.0 is an integer.

Validation stops at a list's first error and tries one branch of a union: errors for 1 MB of body would take 1 GB.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from runtime.errors import InvalidRequest
from runtime.json_text import check_unicode
from server.http import fields, unknown_fields

# Most prompts in one request.
MAX_BATCH = 1024
# Tags of a union's branches. They are no identifiers, so `errors.py` leaves them out of a field's path.
_ONE, _MANY, _TEXTS, _IDS = "one of them", "a list", "as text", "as ids"

T = TypeVar("T")
Many = TypeVar("Many")


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bound(schema: Any, owner: str) -> Any:
    """Change a schema so that lists stop at their first error, and 1.0 counts as 1 except in lists of ids.

    Raises TypeError for a list without max_length, unless it holds ids.
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
        if schema["items_schema"]["type"] == "int":  # a check of every id would cost more than parsing them
            return schema
        if "max_length" not in schema:
            raise TypeError(f"{owner} has a list without max_length")
    if kind == "function-before" and schema["function"].get("function") is _integral:
        return schema  # already changed, as a part of another body
    return {name: part if name == "keys_schema" else _bound(part, owner) for name, part in schema.items()}


class Body(BaseModel):
    """Base of request bodies.

    Attributes:
        IGNORED: fields without effect.
        ALIASES: other servers' names for fields.
        NEUTRAL: unsupported fields, with the values that are accepted because they ask for nothing.
        NULL_COUNTS: fields for which null is a value and not the default.
        WITHIN: names of fields within a field, with the names that are meant.
        IS_OWN: whether no other server has such a body, so that all unknown fields are errors.
        KNOWN: the JSON names of all fields.
    """

    # Errors that nobody has expected are logged, and inputs are prompts.
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    ALIASES: ClassVar[Mapping[str, str]] = {}
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    NULL_COUNTS: ClassVar[frozenset[str]] = frozenset()
    WITHIN: ClassVar[Mapping[str, str]] = {}
    IS_OWN: ClassVar[bool] = False

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
        """Map aliases and drop fields without effect. Pydantic refuses what is left. Raises InvalidRequest."""
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
                    cls._without(name)
            elif (own := cls.ALIASES.get(name)) is not None:
                if used.setdefault(own, value) is not value and used[own] != value:
                    raise InvalidRequest(f"{name} and {own} are the same field, with two values", param=name)
            elif cls.model_config["extra"] == "ignore":
                continue
            elif meant := cls.WITHIN.get(name) or unknown_fields.meant(name, own_names):
                names = {"field": name, "meant": meant}
                raise PydanticCustomError("extra_forbidden", "unknown field {field}; did you mean {meant}?", names)
            elif cls.IS_OWN or not unknown_fields.leave_out_unknown(name, value):
                return used | {name: value}
        return used

    @staticmethod
    def _without(name: str) -> None:
        """Leave out a sampler that Ramet does not have. Raises InvalidRequest for other unsupported fields."""
        if name not in fields.SAMPLERS or not unknown_fields.leave_out(name):
            raise InvalidRequest(f"{name} is not supported{fields.INSTEAD.get(name, '')}", param=name)


class Named(Body):
    """Base of bodies whose answers name what is left out of the request."""

    _left_out: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _with_left_out(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        with unknown_fields.collected() as found:
            body = handler(data)
        body._left_out += found
        return body

    @property
    def left_out(self) -> list[str]:
        """What the answer does not regard: unknown fields, tools, and parts of messages."""
        return self._left_out


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not Unicode text") from None
    return text


def _unicode_within(value: dict[str, Any]) -> dict[str, Any]:
    check_unicode(value)
    return value


def _written(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


Text = Annotated[str, AfterValidator(_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_unicode_within)]
# The text of a JSON object. The object itself is accepted, too.
JsonText = Annotated[
    str, BeforeValidator(_written, json_schema_input_type=str | dict[str, Any]), AfterValidator(_unicode)
]
TokenIds = list[Annotated[int, Field(ge=0)]]
# A union of a single value and a list. `OneOrMany` is a T or up to MAX_BATCH of them.
OneOr = Annotated[
    Annotated[T, Tag(_ONE)] | Annotated[Many, Tag(_MANY)],
    Discriminator(lambda value: _MANY if isinstance(value, list) else _ONE),
]
OneOrMany = OneOr[T, Annotated[list[T], Field(max_length=MAX_BATCH)]]
# One prompt that is a list itself, or a list of such prompts.
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


class Unusable(Body, extra="ignore"):
    """A tool that the model cannot use, or a part of a message that it cannot read.

    The prompt has one line in place of such a part, and nothing of such a tool; the answer's `left_out` lists both.
    """

    type: str

    @property
    def text(self) -> str:
        return f"[{self.type[:64]}: left out, because this model reads text alone]"

    @property
    def left_out(self) -> list[str]:
        """What the answer does not regard of a part."""
        return [f"content {self.type}"]


class ByType:
    """Annotation of a union of bodies. The field `type` chooses the branch; the first branch is the default.

    A branch whose `type` is a plain `str` takes the types that no other branch has. A branch that is no body accepts
    strings. Tags are no identifiers: `errors.py` leaves them out of a field's path.

    Args:
        kind: returns the type of a value; default: the value's field `type`.
    """

    def __init__(self, kind: Callable[[Any], Any] | None = None):
        self._type_of = kind or type_of

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tags: dict[Any, str] = {}
        for kind in get_args(source):
            field = getattr(kind, "model_fields", {}).get("type")
            tags |= dict.fromkeys(get_args(field.annotation) if field else (str,), f"as {kind}")
        default = next(tag for name, tag in tags.items() if name is not str)
        types = {kind: getattr(kind, "model_fields", {}).get("type") for kind in get_args(source)}
        other = next((f"as {kind}" for kind, field in types.items() if field and field.annotation is str), default)

        def tag_of(value: Any) -> str:
            if isinstance(value, str):
                return tags.get(str, default)
            name = self._type_of(value)
            return tags.get(name, other) if isinstance(name, str) else default

        branches = tuple(Annotated[kind, Tag(f"as {kind}")] for kind in get_args(source))
        return handler.generate_schema(Annotated[Union[branches], Discriminator(tag_of)])  # noqa: UP007


def type_of(value: Any) -> Any:
    """The field `type` of a dict or a body; None if it has none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def example(**fields: Any) -> ConfigDict:
    """The `model_config` of a body with an example for the API's documentation."""
    return ConfigDict(json_schema_extra={"example": fields})

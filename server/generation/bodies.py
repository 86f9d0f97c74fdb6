"""The fields of request bodies that all APIs share, and the submissions made from them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    Tag,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from radix import Namespace
from runtime.asks import REUSE_BY_METHOD, UNKNOWN_REUSE, AnyReuse, DiffusionParams
from runtime.errors import InvalidRequest
from runtime.frontend.deadline import Deadline
from runtime.frontend.output import Prompt, Submission
from runtime.params import Lazy, SamplingParams
from server.auth.keys import CacheScope, Tenant
from server.http import fields
from server.http.body import Body, CacheSalt, Named, OneOrMany, Text
from server.http.context import Context

MAX_BIASES = 1024

Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31, description="waiting requests with a larger one go first")]
Timeout = Annotated[float, Field(gt=0, le=86_400, description="seconds until the request fails with 408")]
Explain = Annotated[bool, Field(description="report why the prompt was not read from the cache")]
AnswerId = Annotated[
    str, Field(min_length=1, max_length=256, description="id of an earlier answer of this key, to compare prompts with")
]


def _with_int_keys(value: Any) -> Any:
    """Convert a dict's decimal keys to integers, because keys in JSON are strings. Validation refuses other keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} biases are allowed, not {len(value)}")
    return {int(k) if isinstance(k, str) and k.isascii() and k[:20].isdigit() else k: v for k, v in value.items()}


LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), BeforeValidator(_with_int_keys)
]


class Scoped(BaseModel):
    """Base of requests that compute KV: their salt and scope decide who shares the cached pages."""

    cache_salt: CacheSalt | None = None
    cache_scope: CacheScope | None = None

    def namespace(self, tenant: Tenant, context: Context) -> Namespace:
        """The cache namespace. Raises Forbidden for a scope that the key may not use."""
        return tenant.namespace(self.cache_salt, self.cache_scope)

    def parameters(self, tenant: Tenant) -> dict[str, Any]:
        """The fields of `Submission` that this body sets. Raises Forbidden."""
        return {}

    def submission(
        self,
        prompt: Prompt | Callable[[], Prompt],
        sampling: SamplingParams,
        tenant: Tenant,
        context: Context,
        **more: Any,
    ) -> Submission:
        """The tenant's submission of a prompt; `more`: further fields of `Submission`. Raises Forbidden, NotFound."""
        namespace, given = self.namespace(tenant, context), self.parameters(tenant) | more
        return Submission(prompt, sampling, account=tenant.account, namespace=namespace, **given)


class Diffusion(Body, DiffusionParams, strict=True):
    """`DiffusionParams` in a request."""

    IS_OWN = True


class CacheUse(Body):
    """How a request uses the prefix cache."""

    store: bool = Field(True, description="false: KV that the request computes is dropped at its end, in all tiers")
    replay: bool = Field(
        True, description="false: earlier answers in a chat are tokenized anew, and this one is forgotten"
    )
    hold_s: float | None = Field(
        None, ge=0, description="seconds for which the prefixes that the request used are evicted last; see --hold-time"
    )


class GenerationBody(Named, Scoped):
    """The fields that all routes for generation have."""

    # For parameters of the engine that have another name in this body: the field's name.
    NAMES: ClassVar[Mapping[str, str]] = {}

    model: Text | None = Field(None, description="default: the served model")
    lora_path: OneOrMany[Text] | None = Field(None, description="SGLang's: an adapter's name, in place of `model`")
    stream: bool = False
    priority: Priority = 0
    cache: CacheUse = Field(default_factory=CacheUse)
    diffusion: Diffusion | None = None
    timeout_s: Timeout | None = None
    explain: Explain = False
    receipt: bool = Field(False, description="add digests by which `ramet verify` checks the answer")
    _arrived_s: float = PrivateAttr(default_factory=time.monotonic)

    @model_validator(mode="after")
    def _with_adapter(self) -> Self:
        names = {self.lora_path} if isinstance(self.lora_path, str) else set(self.lora_path or ())
        if len(names) > 1:
            raise InvalidRequest("send prompts for several adapters in several requests", param="lora_path")
        self.model = next(iter(names - {""}), self.model)
        return self

    def deadline(self, context: Context) -> Deadline:
        """When the request, which has just arrived when it is read, must have ended."""
        limits = [self.timeout_s, context.config.scheduler.max_timeout]
        return Deadline.after(min((one for one in limits if one is not None), default=None), self._arrived_s)

    @property
    def names(self) -> Mapping[str, str]:
        return self.NAMES

    @property
    def earlier(self) -> str | None:
        """The id of an earlier answer, whose prompt is compared with this one."""
        return None

    def namespace(self, tenant: Tenant, context: Context) -> Namespace:
        namespace, adapter = super().namespace(tenant, context), context.adapter(self.model)
        return namespace if adapter is None else namespace._replace(adapter=adapter.digest)

    def parameters(self, tenant: Tenant) -> dict[str, Any]:
        return {
            "priority": tenant.priority(self.priority),
            "decoding": self.diffusion,
            "store": self.cache.store,
            "hold_s": self.cache.hold_s,
            "replay": self.cache.replay,
        }


class LazyConstraint(Body, Lazy, strict=True):
    """`Lazy` in a request."""


class SamplingBody(Body, SamplingParams, strict=True):
    """`SamplingParams` in a request."""

    IGNORED = fields.OPERATION
    ALIASES: ClassVar[Mapping[str, str]] = {
        **fields.SAMPLING_ALIASES,
        "sampling_seed": "seed",
        "ebnf": "grammar",
    }
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = fields.SAMPLING
    NULL_COUNTS = frozenset({"max_new_tokens"})

    logit_bias: LogitBias = Field(default_factory=dict)
    lazy: LazyConstraint | None = Field(None, description=SamplingParams.model_fields["lazy"].description)

    def plain(self) -> SamplingParams:
        """The parameters as the engine's class."""
        return SamplingParams.model_construct(**{name: getattr(self, name) for name in SamplingParams.model_fields})


class _ReuseBody(Body):
    """Base of the bodies that say how a request reuses KV, by method."""

    IS_OWN = True

    @field_validator("method", mode="before", check_fields=False)
    @classmethod
    def _is_known(cls, method: Any) -> Any:
        """Refuse unknown methods with an error that lists those of all features."""
        if method not in [*REUSE_BY_METHOD]:
            raise PydanticCustomError("literal_error", "Input should be {one}", {"one": " or ".join(REUSE_BY_METHOD)})
        return method


def _tagged(kind: type[BaseModel]) -> Any:
    """The branch of a union that reads the parameters of some methods from a request."""
    name = kind.__name__.removesuffix("Params")
    body = create_model(f"{name}Body", __base__=(_ReuseBody, kind), __cls_kwargs__={"strict": True})
    return Annotated[body, Tag(_tag(kind))]


def _tag(kind: type[BaseModel]) -> str:
    """The tag of a branch: no identifier, so `errors.py` leaves it out of a field's path."""
    return f"of {kind.__name__}"


def _branch(value: Any) -> str:
    method = value.get("method") if isinstance(value, dict) else getattr(value, "method", None)
    return _tag(REUSE_BY_METHOD.get(method, UNKNOWN_REUSE) if isinstance(method, str) else UNKNOWN_REUSE)


class _ByMethod:
    """Reads a field of type `AnyReuse` from the body of the named method."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        branches = reduce(or_, map(_tagged, get_args(AnyReuse)))
        return handler.generate_schema(Annotated[branches, Discriminator(_branch)])


Reuse = Annotated[
    AnyReuse, _ByMethod(), Field(description="reuse beyond exact prefixes, by the named method; default: --reuse")
]


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name the request's fields; `names` maps parameters of the engine to fields."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors()[0]
        name = names.get(str(problem["loc"][0]), str(problem["loc"][0]))
        raise InvalidRequest(f"{name}: {problem['msg'].removeprefix('Value error, ')}", param=name) from None
    except InvalidRequest as error:
        error.param = names.get(error.param, error.param) if error.param else None
        raise

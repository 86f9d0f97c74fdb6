"""`/v1/schemas`: schemas of prompt modules."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from runtime.errors import InvalidRequest
from runtime.reuse.modules.markup import MAX_CHARACTERS
from runtime.reuse.modules.schema import Mode
from server.ahead import Ahead, keep, unpin
from server.auth.keys import Asker
from server.context import Context, Ctx
from server.http import examples
from server.http.answers import JsonAnswer
from server.http.sse import while_there
from server.http.wire import Text
from server.schemas.store import StoredSchema, make

router = APIRouter(prefix="/v1/schemas", tags=["schemas"])

Paths = Annotated[list[Text], Field(max_length=1024)]


class SchemaRequest(Ahead):
    """A schema in PML. `encode` and `pin` compute the KV of all modules now, for requests with the same salt."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "pml": '<schema name="cities">You plan trips.<module name="miami">Miami is a city ...</module></schema>'
            }
        }
    )

    pml: Annotated[Text, Field(max_length=MAX_CHARACTERS)]
    mode: Mode = "independent"
    scaffolds: Annotated[list[Paths], Field(max_length=64)] | None = Field(
        None, description="mode scaffold: sets of paths that are encoded together; default: all outside of unions"
    )


@router.post("", response_model=None, responses=examples.SCHEMA)
async def add_schema(body: SchemaRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Register a schema; the same one again renews its time to live. 409 if another schema has the name."""
    engine = context.engine
    if engine.info.diffusion is not None:
        raise InvalidRequest("a diffusion model takes no modules", param="pml")
    read = partial(make, body.pml, body.mode, body.scaffolds, engine.tokenizer, engine.info.context_length)
    made = await while_there(request, engine.in_turn(tenant.account, len(body.pml), read))
    stored = await keep(context.schemas, made, made.schema.everything, body, request, context, tenant)
    return _show(stored, context)


@router.get("", responses=examples.SCHEMAS)
async def list_schemas(context: Ctx, tenant: Asker) -> dict[str, Any]:
    """The key's own schemas, oldest first, without their modules."""
    now_s = context.schemas.clock()
    return {"object": "list", "data": [stored.describe(now_s) for stored in context.schemas.of(tenant.account)]}


@router.get("/{name}", response_model=None, responses=examples.SCHEMA)
async def get_schema(name: str, context: Ctx, tenant: Asker) -> Response:
    """A schema and its layout."""
    return _show(context.schemas.get(tenant.account, name), context)


@router.delete("/{name}", responses=examples.SUCCESS)
async def delete_schema(name: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Forget a schema and remove its pins; its KV stays cached until it is evicted."""
    await unpin(context.schemas.remove(tenant.account, name), context)
    return {"success": True}


def _show(stored: StoredSchema, context: Context) -> Response:
    return JsonAnswer({**stored.describe(context.schemas.clock()), "modules": stored.modules})

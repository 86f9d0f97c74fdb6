"""vLLM's routes to load and unload low-rank adapters."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from fastapi import APIRouter
from pydantic import Field

from server.errors import NotFound
from server.http.answers import JsonObject
from server.http.body import Body, Text, example
from server.http.context import Ctx

router = APIRouter(prefix="/v1", tags=["adapters"])

Name = Annotated[Text, Field(min_length=1, max_length=128, description="requests have the model NAME or MODEL:NAME")]


class LoadRequest(Body):
    """An adapter to load."""

    model_config = example(lora_name="poems", lora_path="/adapters/poems")
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {"base_model_name": (), "is_3d_lora_weight": (False,)}

    lora_name: Name
    lora_path: Text = Field(
        min_length=1, max_length=4096, description="directory below --admin-root, written by PEFT's save_pretrained"
    )
    load_inplace: bool = Field(False, description="replace the adapter of this name")


class UnloadRequest(Body):
    """An adapter to unload."""

    model_config = example(lora_name="poems")
    IGNORED = frozenset({"lora_int_id"})

    lora_name: Name


@router.post("/load_lora_adapter")
async def load_adapter(context: Ctx, body: LoadRequest) -> JsonObject:
    """Serve an adapter from now on."""
    path = context.below_root(body.lora_path, "lora_path")
    adapter = await context.engine.adapters.load(body.lora_name, path, body.load_inplace)
    return {"success": True, "lora_name": adapter.name, "rank": adapter.rank, "digest": adapter.digest}


@router.post("/unload_lora_adapter")
async def unload_adapter(context: Ctx, body: UnloadRequest) -> JsonObject:
    """Unload an adapter. New requests for it are refused; the `running` requests keep its weights to their end."""
    running = await context.engine.adapters.unload(body.lora_name)
    if running is None:
        raise NotFound(f"there is no adapter {body.lora_name!r}", param="lora_name", code="adapter_not_found")
    return {"success": True, "running": running}

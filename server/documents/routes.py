"""`/v1/documents`: documents whose KV is computed before a prompt reads it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from runtime.errors import InvalidRequest
from runtime.reuse.fusion.prompt import Document
from server.ahead import Ahead, keep, unpin
from server.auth.keys import Asker
from server.context import Context, Ctx
from server.documents.store import StoredDocument, make
from server.documents.wire import Title
from server.http import examples
from server.http.answers import JsonAnswer, JsonList
from server.http.sse import while_there
from server.http.wire import Text

router = APIRouter(prefix="/v1/documents", tags=["documents"])


class DocumentRequest(Ahead):
    """A document. `encode` and `pin` compute its KV now, for requests with the same salt and `chunk_tokens`."""

    model_config = ConfigDict(json_schema_extra={"example": {"title": "Rome", "text": "Rome is old."}})

    text: Annotated[Text, Field(min_length=1)]
    title: Title | None = None
    chunk_tokens: int = Field(512, ge=16, le=4096, description="as of the requests that will read it")
    encode: bool = Field(True, description="compute the KV now; else at its first use")


@router.post("", responses=examples.DOCUMENT)
async def add_document(body: DocumentRequest, request: Request, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Store a document by its content; the same one again renews its time to live."""
    engine = context.engine
    if engine.info.diffusion is not None:
        raise InvalidRequest("a diffusion model reuses no documents", param="text")
    document = Document(body.text, body.title or "")
    space = tenant.namespace(body.cache_salt, body.cache_scope)
    read = partial(make, document, body.chunk_tokens, space, engine.tokenizer, engine.info.context_length)
    made = await while_there(request, engine.in_turn(tenant.account, len(body.text), read))
    stored = await keep(context.documents, made, made.encoding, body, request, context, tenant)
    stored.chunk_tokens, stored.namespace = body.chunk_tokens, space
    return await _show(stored, context)


@router.get("", response_model=None, responses=examples.DOCUMENTS)
async def list_documents(context: Ctx, tenant: Asker) -> Response:
    """The key's own documents, oldest first."""
    documents, now_s = JsonList(), context.documents.clock()
    for stored in context.documents.of(tenant.account):
        documents.append(stored.describe(now_s))
    return JsonAnswer({"object": "list", "data": documents})


@router.get("/{document_id}", responses=examples.DOCUMENT)
async def get_document(document_id: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """A document, and the part of it that is cached."""
    return await _show(context.documents.get(tenant.account, document_id), context)


@router.delete("/{document_id}", responses=examples.SUCCESS)
async def delete_document(document_id: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Forget a document and remove its pins; its KV stays cached until it is evicted."""
    await unpin(context.documents.remove(tenant.account, document_id), context)
    return {"success": True}


async def _show(stored: StoredDocument, context: Context) -> dict[str, Any]:
    cached = sum(await context.engine.cached(stored.encoding(), stored.namespace))
    return {**stored.describe(context.documents.clock()), "cached": min(cached, stored.num_tokens)}

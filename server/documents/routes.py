"""`/v1/documents`: documents whose KV is computed before a prompt reads it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.reuse.fusion.prompt import Document
from server.ahead import Ahead, keep, live_pins, unpin
from server.auth.keys import Asker, CacheScope, EveryKey
from server.context import Context, Ctx
from server.documents.store import StoredDocument, make
from server.documents.wire import Title
from server.http import examples
from server.http.answers import JsonAnswer, JsonList
from server.http.sse import while_there
from server.http.wire import CacheSalt, Text, example

router = EveryKey(prefix="/v1/documents", tags=["documents"])

ChunkTokens = Annotated[int, Field(ge=16, le=4096, description="as of the requests that will read the document")]


class DocumentRequest(Ahead):
    """A document. `encode` and `pin` compute its KV now, for requests with the same salt and `chunk_tokens`."""

    model_config = example(title="Rome", text="Rome is old.")

    text: Annotated[Text, Field(min_length=1)]
    title: Title | None = None
    chunk_tokens: ChunkTokens = 512
    encode: bool = Field(True, description="compute the KV now; else at its first use")


@router.post("", responses=examples.DOCUMENT)
async def add_document(body: DocumentRequest, request: Request, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Store a document by its content; the same one again renews its time to live."""
    engine = context.engine
    if engine.info.diffusion is not None:
        raise InvalidRequest("a diffusion model reuses no documents", param="text")
    read = partial(make, Document(body.text, body.title or ""), engine.tokenizer, engine.info.context_length)
    made = await while_there(request, engine.in_turn(tenant.account, len(body.text), read))
    ahead = partial(made.encoding, body.chunk_tokens)
    stored = await keep(context.documents, made, ahead, body, request, context, tenant)
    return await _show(stored, body.chunk_tokens, tenant.namespace(body.cache_salt, body.cache_scope), context)


@router.get("", response_model=None, responses=examples.DOCUMENTS)
async def list_documents(context: Ctx, tenant: Asker) -> Response:
    """The key's own documents, oldest first."""
    shown, documents = JsonList(), context.documents.of(tenant.account)
    now_s, live = context.documents.clock(), await live_pins(documents, context)
    for stored in documents:
        shown.append(stored.describe(now_s, live))
    return JsonAnswer({"object": "list", "data": shown})


@router.get("/{document_id}", responses=examples.DOCUMENT)
async def get_document(
    document_id: str,
    context: Ctx,
    tenant: Asker,
    chunk_tokens: ChunkTokens = 512,
    cache_salt: CacheSalt | None = None,
    cache_scope: CacheScope = "private",
) -> dict[str, Any]:
    """A document, and its tokens that are cached now for prompts with these chunks, this salt and scope."""
    stored = context.documents.get(tenant.account, document_id)
    return await _show(stored, chunk_tokens, tenant.namespace(cache_salt, cache_scope), context)


@router.delete("/{document_id}", responses=examples.SUCCESS)
async def delete_document(document_id: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Forget a document and remove its pins; its KV stays cached until it is evicted."""
    await unpin(context.documents.remove(tenant.account, document_id), context)
    return {"success": True}


async def _show(stored: StoredDocument, chunk_tokens: int, namespace: Namespace, context: Context) -> dict[str, Any]:
    live = await live_pins([stored], context)
    cached = await context.engine.cached(stored.encoding(chunk_tokens), namespace)
    return {
        **stored.describe(context.documents.clock(), live),
        "chunks": -(-stored.num_tokens // chunk_tokens),
        "cached": sum(cached.values()),
    }

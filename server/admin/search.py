"""The route that finds nodes of the tree by their text."""

from __future__ import annotations

from array import array
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request, Response
from pydantic import Field

from runtime.models.tokenizer import Tokenizer
from server.admin.cache import named, preview_tokens
from server.auth.keys import Asker, EveryKey, Forbidden
from server.context import Context, Ctx
from server.http import examples
from server.http.sse import unless_gone
from server.http.wire import Body, CacheSalt, Text, example

router = EveryKey(prefix="/cache", tags=["cache"])

# Tokens that a search reads at most.
_MOST_TOKENS = 1 << 20
# Characters that are shown on both sides of a find.
_AROUND = 60
_MOST_CHARACTERS = 256


class SearchRequest(Body):
    """A text, of which upper and lower case are alike."""

    model_config = example(text="ship models")

    text: Text = Field(min_length=1, max_length=_MOST_CHARACTERS)
    tenant: str | None = Field(None, description="admin keys: name of the API key in whose nodes to look; default: all")
    cache_salt: CacheSalt | None = Field(
        None,
        description="whose nodes to search; default: admins: all, others: their nodes without a salt",
    )
    limit: int = Field(20, ge=1, le=100, description="most nodes in the answer")


@router.post("/search", response_model=None, responses=examples.FOUND)
async def search(context: Ctx, asker: Asker, body: SearchRequest, request: Request) -> Response:
    """Nodes of the tree that hold a text, or end it; keys without `admin` find their own."""
    if not asker.admin and body.tenant not in (None, asker.name):
        raise Forbidden("this key may only search its own nodes", param="tenant")
    whose = named(body.tenant, context) if body.tenant is not None else asker
    everybody = asker.admin and body.tenant is None
    # Users of one key see each other's text only where they share a salt.
    salt = body.cache_salt if asker.admin else body.cache_salt or ""

    async def work() -> dict[str, Any]:
        finder = _Finder(body.text, body.limit, context.engine.tokenizer)
        async with aclosing(context.engine.runs(None if everybody else whose.account, salt)) as walk:
            async for runs in walk:
                await context.engine.in_turn(asker.account, len(body.text), partial(finder.look, runs))
                if finder.done:
                    break
        return {"nodes": [_show(node, context) for node in finder.found], "searched_tokens": finder.tokens,
                "complete": not finder.done}  # fmt: skip

    return await unless_gone(request, work())


def _show(node: dict[str, Any], context: Context) -> dict[str, Any]:
    return {**node, "tenant": context.tenant_name(node["tenant"])}


class _Finder:
    """Finds a text in nodes that come parents first.

    Attributes:
        found: the nodes that have it, as the route answers them.
        tokens: read so far.
        done: whether enough were found or read, and nodes are left out.
    """

    def __init__(self, text: str, limit: int, tokenizer: Tokenizer):
        self._text = text.lower()
        self._overlap = min(len(text.encode()), 64)  # a token has a byte at least
        self._limit = limit
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._ends: dict[int, array[int]] = {}
        self._parents: dict[int, int | None] = {}
        self.found: list[dict[str, Any]] = []
        self.tokens = 0
        self.done = False

    def look(self, runs: list[dict[str, Any]]) -> None:
        """Read a slice of nodes."""
        for run in runs:
            self.done = len(self.found) == self._limit or self.tokens >= _MOST_TOKENS
            if self.done:
                return
            self._parents[run["id"]] = run["parent"]
            self._read(run, preview_tokens(run.pop("key")))

    def _read(self, run: dict[str, Any], tokens: list[int]) -> None:
        # The text of a run depends on what stands before it, and what is sought may begin there.
        before = self._ends.get(run["parent"], array("i"))
        path = before + array("i", tokens)
        self._ends[run["id"]] = path[-self._overlap :]
        self.tokens += len(tokens)
        text, head = self._decode(list(path)), self._decode(list(before))
        at = text.lower().find(self._text, max(0, len(head) - len(self._text) + 1))
        if at >= 0:
            shown = text[max(at - _AROUND, 0) : at + len(self._text) + _AROUND]
            self.found.append({**run, "tokens": len(tokens), "above": self._above(run["parent"]), "text": shown})

    def _above(self, page: int | None) -> list[int]:
        """The ids of the nodes above, the root's child first."""
        found: dict[int, None] = {}
        while page is not None and page not in found:  # a page may get another node while the walk goes on
            found[page] = None
            page = self._parents.get(page)
        return [*found][::-1]

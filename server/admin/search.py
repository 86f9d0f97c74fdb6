"""The route that searches the tree's nodes for text."""

from array import array
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from fastapi import Request, Response
from msgspec.structs import asdict
from pydantic import Field

from runtime.calls import TreeRun
from runtime.models.tokenizer import Tokenizer
from server.admin.cache import preview_tokens
from server.admin.node_ids import ids_for
from server.auth.keys import CurrentTenant, EveryKey
from server.http.answers import JsonObject
from server.http.body import Body, CacheSalt, Text, example
from server.http.context import Context, Ctx
from server.http.sse import unless_gone

router = EveryKey(prefix="/cache", tags=["cache"])

# Most tokens that a search reads.
_MOST_TOKENS = 1 << 20
# Characters shown on both sides of a match.
_AROUND = 60
_MOST_CHARACTERS = 256


class SearchRequest(Body):
    """The text to search for; case is ignored."""

    model_config = example(text="ship models")

    text: Text = Field(min_length=1, max_length=_MOST_CHARACTERS)
    tenant: str | None = Field(None, description="admin keys: search this API key's nodes, by name; default: all nodes")
    cache_salt: CacheSalt | None = Field(
        None,
        description="search nodes of this salt; default: nodes without a salt, and for admins all nodes",
    )
    limit: int = Field(20, ge=1, le=100, description="most nodes in the answer")


@router.post("/search", response_model=None)
async def search(context: Ctx, asker: CurrentTenant, body: SearchRequest, request: Request) -> Response:
    """The nodes in which an occurrence of the text ends. Keys without `admin` search only their own nodes."""
    whose = context.visible(asker, body.tenant)
    account = None if whose is None else whose.account
    # Users of one key see each other's text only if they share a salt.
    salt = body.cache_salt if asker.admin else body.cache_salt or ""

    async def work() -> JsonObject:
        finder = _Finder(body.text, body.limit, context.engine.tokenizer)
        async with aclosing(context.engine.runs(account, salt)) as walk:
            async for runs in walk:
                await context.engine.in_turn(asker.account, len(body.text), partial(finder.look, runs))
                if finder.done:
                    break
        id_of = ids_for(asker)
        nodes = [node.show(context, id_of) for node in finder.found]
        return {"nodes": nodes, "searched_tokens": finder.tokens, "complete": not finder.done}

    return await unless_gone(request, work())


class _Found(NamedTuple):
    """A node in which an occurrence ends; `above`: the ids of the nodes above it, topmost first."""

    run: TreeRun
    tokens: int
    above: list[int]
    text: str

    def show(self, context: Context, id_of: Callable[[int], int]) -> JsonObject:
        """The node in an answer, with the ids that the asker may see."""
        shown = asdict(context.named(self.run))
        del shown["key"]
        shown["id"] = id_of(self.run.id)
        shown["parent"] = None if self.run.parent is None else id_of(self.run.parent)
        above = [id_of(page) for page in self.above]
        return {**shown, "tokens": self.tokens, "above": above, "text": self.text}


class _Finder:
    """Finds a text in nodes, which are passed to `look` with parents before children.

    Attributes:
        found: the matching nodes.
        tokens: tokens read so far.
        done: whether the search stopped early.
    """

    def __init__(self, text: str, limit: int, tokenizer: Tokenizer):
        self._text = text.lower()
        self._overlap = min(len(text.encode()), 64)  # a token has a byte at least
        self._limit = limit
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._ends: dict[int, array[int]] = {}
        self._parents: dict[int, int | None] = {}
        self.found: list[_Found] = []
        self.tokens = 0
        self.done = False

    def look(self, runs: list[TreeRun]) -> None:
        """Read a slice of nodes."""
        for run in runs:
            self.done = len(self.found) == self._limit or self.tokens >= _MOST_TOKENS
            if self.done:
                return
            self._parents[run.id] = run.parent
            self._read(run, preview_tokens(run.key))

    def _read(self, run: TreeRun, tokens: list[int]) -> None:
        # A match may begin in the nodes above, and their last tokens can change how this node's tokens decode.
        before = self._ends.get(-1 if run.parent is None else run.parent, array("i"))
        path = before + array("i", tokens)
        self._ends[run.id] = path[-self._overlap :]
        self.tokens += len(tokens)
        text, head = self._decode(list(path)), self._decode(list(before))
        at = text.lower().find(self._text, max(0, len(head) - len(self._text) + 1))
        if at >= 0:
            shown = text[max(at - _AROUND, 0) : at + len(self._text) + _AROUND]
            self.found.append(_Found(run, len(tokens), self._above(run.parent), shown))

    def _above(self, page: int | None) -> list[int]:
        """The ids of a node and its ancestors, topmost first."""
        found: dict[int, None] = {}
        while page is not None and page not in found:  # a page may get another node during the walk
            found[page] = None
            page = self._parents.get(page)
        return [*found][::-1]

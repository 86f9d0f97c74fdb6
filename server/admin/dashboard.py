"""The dashboard page, its stream of events, and the API's documentation page."""

import asyncio
import base64
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import lru_cache
from importlib.resources import files

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from msgspec.structs import asdict, replace

from radix import Eviction
from radix.views import Block
from runtime.calls import GetOutline, GetRequests, GetState
from runtime.errors import Overloaded, RametError
from server.admin.cache import fields_of, pins_of, preview_tokens, quota_of
from server.admin.history import EVERY_S, MOST, sample
from server.admin.node_ids import ids_for
from server.auth.keys import EVERYONE, CurrentTenant, EveryKey, Tenant
from server.http.answers import JsonObject
from server.http.context import Context, find
from server.http.sse import EventStream
from server.telemetry.journal import Journal
from server.telemetry.metrics import Metrics

router = EveryKey(tags=["dashboard"], include_in_schema=False)

_MOST_BLOCKS = 500
_PREVIEW_TOKENS = 48
_MOST_REQUESTS = 100
_MOST_VIEWERS, _MOST_OF_TENANT = 32, 4
# Shortest pause between two walks of the tree, in multiples of the last walk's duration.
_REST = 10
_SCRIPTS = ("base", "charts", "tree", "node", "tables", "pictures", "chat", "canvas", "play", "live")


@router.get("/")
@router.get("/dashboard")
async def page() -> Response:
    """The static page; its data comes over routes that need a key."""
    return _answer("page", _SCRIPTS)


@router.get("/docs")
async def docs() -> Response:
    """The API's documentation page, which reads `/openapi.json`."""
    return _answer("docs", ("base", "docs"))


def _answer(name: str, scripts: tuple[str, ...]) -> Response:
    html, policy = _page(name, scripts)
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                                       "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"})  # fmt: skip


@lru_cache
def _page(name: str, scripts: tuple[str, ...]) -> tuple[str, str]:
    """A page's HTML and its Content-Security-Policy, which allows the page's own script and nothing from elsewhere."""
    parts = files("server") / "static" / "page"
    script = '"use strict";\n' + "".join((parts / f"{part}.js").read_text("utf-8") for part in scripts)
    html = (parts / f"{name}.html").read_text("utf-8")
    html = html.replace("/* style.css */", (parts / "style.css").read_text("utf-8"), 1)
    html = html.replace("/* scripts */", script, 1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return html, (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@router.get("/dashboard/events", response_model=None)
async def events(request: Request, asker: CurrentTenant) -> EventStream:
    """Figures every second, and the tree when it has changed. A key without `admin` gets only its own data."""
    feed = find(request.app, Feed)
    return EventStream(feed.follow(asker), feed.enter(asker))


class _View:
    """Data shared by all viewers with the same rights: everything (tenant None), or one tenant's data."""

    def __init__(self, tenant: Tenant | None):
        self.tenant = tenant
        self.viewers = 0
        self.lock = asyncio.Lock()
        self.figures: JsonObject = {}
        self.figures_s = float("-inf")
        self.tree: JsonObject = {}
        self.version = 0
        self.walk_after_s = float("-inf")

    @property
    def account(self) -> str | None:
        return None if self.tenant is None else self.tenant.account


class Feed:
    """The dashboard's data. The last hour's figures are always recorded. Everything else is computed while a dashboard
    is open, once for all viewers with the same rights.
    """

    def __init__(self, context: Context, metrics: Metrics, journal: Journal):
        self.context = context
        self._metrics = metrics
        self._journal = journal
        self.history: deque[JsonObject] = deque(maxlen=MOST)
        self._views: dict[str, _View] = {}
        self._closing = asyncio.Event()
        self._walking = asyncio.Lock()

    def enter(self, asker: Tenant) -> Callable[[], None]:
        """Count a viewer; returns the function to call when it leaves. Raises Overloaded over the limit."""
        key = "" if asker.admin else asker.name
        view = self._views.get(key) or _View(None if asker.admin else asker)
        total = sum(one.viewers for one in self._views.values())
        if total >= _MOST_VIEWERS or (not asker.admin and view.viewers >= _MOST_OF_TENANT):
            raise Overloaded("too many dashboards are open already")
        self._views[key] = view
        view.viewers += 1

        def leave() -> None:
            view.viewers -= 1
            if not view.viewers:
                del self._views[key]

        return leave

    def close(self) -> None:
        """End all streams, because the server stops."""
        self._closing.set()

    def erase(self, account: str) -> None:
        """Forget the text that viewers have seen, which is read anew."""
        Feed._decode.cache_clear()
        for view in self._views.values():
            view.tree, view.figures, view.walk_after_s, view.figures_s = {}, {}, float("-inf"), float("-inf")

    async def keep_history(self) -> None:
        """Record figures until the server stops."""
        while not self._closing.is_set():
            with contextlib.suppress(RametError):  # the engine died; another may be started
                self.history.append(sample(await self.context.engine.call(GetState()), self.context, self._metrics))
            await self._pause(EVERY_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def follow(self, asker: Tenant) -> AsyncGenerator[JsonObject, None]:
        """Events for one viewer, until it leaves, the server stops or the engine dies."""
        view = self._views["" if asker.admin else asker.name]
        yield {"model": self._model(), "asker": {"name": asker.name, "admin": asker.admin}}
        if asker.admin:
            yield {"history": list(self.history)}
        seen = 0
        while not self._closing.is_set():
            yield {"figures": await self._fresh_figures(view)}
            await self._refresh_tree(view)
            if view.version != seen:
                seen = view.version
                yield {"tree": view.tree}
            await self._pause(1.0)

    def _model(self) -> JsonObject:
        info = self.context.engine.info
        return {"name": info.name, "dtype": info.dtype, "device": info.device, "page_size": info.page_size,
                "pool_tokens": info.pool_tokens, "context_length": info.context_length,
                "architecture": info.architecture, "attention_backend": info.attention_backend,
                "eviction_policy": self.context.config.cache.eviction_policy}  # fmt: skip

    async def _fresh_figures(self, view: _View) -> JsonObject:
        async with view.lock:
            if time.monotonic() - view.figures_s >= 0.9:
                engine, context = self.context.engine, self.context
                live = await engine.call(GetRequests(_MOST_REQUESTS, view.account))
                figures: JsonObject = {
                    # Without the engine's choice and serial number.
                    "requests": [replace(context.named(one), rid=one.rid.rpartition("/")[0]) for one in live],
                    "finished": [context.named(one) for one in self._journal.last(view.account)],
                }
                if view.tenant is None:
                    view.figures = {**sample(await engine.call(GetState()), context, self._metrics), **figures}
                else:
                    view.figures = {"at_s": time.time(), **figures, "quota": await quota_of(view.tenant, context)}
                view.figures_s = time.monotonic()
            return view.figures

    async def _refresh_tree(self, view: _View) -> None:
        if time.monotonic() < view.walk_after_s:
            return
        engine, tenant = self.context.engine, view.tenant
        async with self._walking:  # the engine makes one walk at a time
            begin = time.monotonic()
            if begin < view.walk_after_s:
                return  # another viewer has refreshed it
            preview = 0 if tenant else _PREVIEW_TOKENS
            outline = await engine.call(GetOutline(_MOST_BLOCKS, preview, view.account))
            end = time.monotonic()
            view.walk_after_s = end + max(_REST * (end - begin), 2.0)
        all_pins = await pins_of(self.context)
        pins: JsonObject = asdict(all_pins)
        if tenant is not None:
            pins = {"pins": [pin for pin in all_pins.pins if pin.tenant == tenant.name]}
        ids = ids_for(tenant or EVERYONE)
        tree = {
            "blocks": [self._show(block, outline.tiers, ids) for block in outline.blocks],
            "evictions": [self._named(eviction) for eviction in outline.evictions],
            **pins,
        }
        if tree != view.tree:
            view.tree, view.version = tree, view.version + 1

    def _show(self, block: Block, tiers: Mapping[int, list[str]] | None, id_of: Callable[[int], int]) -> JsonObject:
        tokens = preview_tokens(block.preview)
        shown = self._named(block)
        # Whole seconds suffice for the colour; fractions would make every tree differ.
        shown |= {"idle_s": round(block.idle_s), "held_s": round(block.held_s)}
        shown |= {"id": id_of(block.id), "end": (id_of(block.end[0]), block.end[1])}
        shown["preview"] = self._decode(tuple(tokens)) if tokens else ""
        if tiers is not None:
            shown["tiers"] = tiers[block.id]
        return shown

    def _named(self, one: Block | Eviction) -> JsonObject:
        """With the tenant's name, the salt and the kind of entry in place of `namespace`."""
        shown, space = fields_of(one), one.namespace
        del shown["namespace"]
        kind = space.entry.partition(":")[0]
        return {**shown, "tenant": self.context.tenant_name(space.tenant), "salt": space.salt, "kind": kind}

    @lru_cache(4 * _MOST_BLOCKS)  # noqa: B019 (one feed lives as long as its server)
    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self.context.engine.tokenizer.decode(list(tokens), skip_special_tokens=False)

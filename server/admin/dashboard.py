"""The dashboard: its page and its stream of events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from radix import Namespace
from runtime.errors import Overloaded, RametError
from server.admin.cache import preview_tokens
from server.context import Context
from server.http.sse import EventStream

router = APIRouter(tags=["dashboard"], include_in_schema=False)

_EVERY_S = 1.0
_MOST_BLOCKS = 500
_PREVIEW_TOKENS = 32
_MOST_REQUESTS = 100
_MOST_VIEWERS = 32
# Least pause between two walks of the tree, in multiples of the last walk's duration.
_REST = 10
_COUNTED = ("running", "waiting", "pages_total", "pages_free", "pages_tree", "pages_private", "pages_locked",
            "pages_pinned", "pins", "tree_nodes", "queried_tokens", "cached_tokens", "prompt_tokens",
            "generation_tokens", "requests", "evicted_tokens", "retracted_requests",
            "substituted_pages", "saved_pages")  # fmt: skip


@router.get("/")
@router.get("/dashboard")
async def page() -> Response:
    """The static page; its data comes over routes that need a key."""
    html, policy = _page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                                       "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"})  # fmt: skip


@lru_cache
def _page() -> tuple[str, str]:
    """The page and its Content-Security-Policy: only its own script runs, and nothing is loaded from elsewhere."""
    html = (files("server") / "static" / "dashboard.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    return html, (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@router.get("/dashboard/events", response_model=None)
async def events(request: Request) -> EventStream:
    """Figures every second, and the tree when it has changed."""
    feed: Feed = request.app.state.feed
    return EventStream(feed.follow(), feed.enter())


class Feed:
    """The dashboard's data, computed once for all viewers, and only while there are any."""

    def __init__(self, context: Context):
        self.context = context
        self._viewers = 0
        self._closing = asyncio.Event()
        self._lock = asyncio.Lock()
        self._figures: dict[str, Any] = {}
        self._figures_s = float("-inf")
        self._tree: dict[str, Any] = {}
        self._version = 0
        self._walk: asyncio.Task[None] | None = None
        self._walk_after_s = float("-inf")

    def enter(self) -> Callable[[], None]:
        """Count a viewer; returns the function to call when it leaves. Raises Overloaded over the limit."""
        if self._viewers >= _MOST_VIEWERS:
            raise Overloaded(f"{_MOST_VIEWERS} dashboards are open already")
        self._viewers += 1
        return self._leave

    def _leave(self) -> None:
        self._viewers -= 1
        if not self._viewers:
            # The next viewer must not see an outdated tree.
            self._tree, self._version, self._walk_after_s = {}, 0, float("-inf")
            if self._walk is not None:
                self._walk.cancel()

    def close(self) -> None:
        """End all streams, as the server stops."""
        self._closing.set()

    async def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Events for one viewer, until it leaves, the server stops or the engine dies."""
        yield {"model": self._model()}
        seen = 0
        while True:
            yield {"figures": await self._fresh_figures()}
            self._keep_walking()
            if self._version != seen:
                seen = self._version
                yield {"tree": self._tree}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _EVERY_S)
                return

    def _model(self) -> dict[str, Any]:
        info = self.context.engine.info
        return {"name": info.name, "dtype": info.dtype, "device": info.device, "page_size": info.page_size,
                "pool_tokens": info.pool_tokens, "context_length": info.context_length}  # fmt: skip

    async def _fresh_figures(self) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._figures_s >= 0.9 * _EVERY_S:
                engine = self.context.engine
                state, requests = await asyncio.gather(engine.state(), engine.requests(_MOST_REQUESTS))
                for request in requests:
                    request["rid"] = request["rid"].rpartition("/")[0]  # drop the engine's choice and serial number
                    request["tenant"] = self.context.tenant_name(request["tenant"])
                counted = {name: state.get(name, 0) for name in _COUNTED}
                counted |= {name: state.get(name, {}) for name in ("tiers", "loaded_tokens_by_tier")}
                self._figures = {"at_s": time.time(), **counted, **self.context.metrics.now(), "requests": requests}
                self._figures_s = time.monotonic()
            return self._figures

    def _keep_walking(self) -> None:
        if (self._walk is None or self._walk.done()) and time.monotonic() >= self._walk_after_s:
            self._walk = asyncio.create_task(self._walk_tree())

    async def _walk_tree(self) -> None:
        begin = time.monotonic()
        try:
            outline = await self.context.engine.outline(_MOST_BLOCKS, _PREVIEW_TOKENS)
            tree = {
                "blocks": [self._show(block) for block in outline["blocks"]],
                "evictions": [self._named(eviction) for eviction in outline["evictions"]],
                **await self.context.engine.pins(),
            }
        except RametError:
            return  # the engine died; the figures report it
        end = time.monotonic()
        self._walk_after_s = end + max(_REST * (end - begin), 2 * _EVERY_S)
        if tree != self._tree:
            self._tree, self._version = tree, self._version + 1

    def _show(self, block: dict[str, Any]) -> dict[str, Any]:
        tokens = preview_tokens(block.pop("preview"))
        text = self._decode(tuple(tokens)) if tokens else ""
        # Whole seconds suffice for the colour; fractions would make every tree differ.
        idle = round(block["idle_s"])
        return self._named(block) | {"idle_s": idle, "preview": text}

    def _named(self, shown: dict[str, Any]) -> dict[str, Any]:
        """With the tenant's name instead of the namespace."""
        return shown | {"namespace": self.context.tenant_name(Namespace(*shown["namespace"]).tenant)}

    @lru_cache(4 * _MOST_BLOCKS)  # noqa: B019 (one feed lives as long as its server)
    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self.context.engine.tokenizer.decode(list(tokens), skip_special_tokens=False)

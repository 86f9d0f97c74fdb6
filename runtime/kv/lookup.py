"""A prompt's look-up in the cache, told so that a miss can be explained."""

from __future__ import annotations

from itertools import islice

from radix import Match, Namespace, Node
from radix.node import TOKEN_BYTES
from runtime.kv.cache import PagedCache
from runtime.protocol import Lookup
from runtime.request import Request

# Tokens of another prompt that are told, and cached prompts of which the latest is chosen.
_TOLD, _LOOKED_AT = 32, 64


def look_up(cache: PagedCache, key: bytes, namespace: Namespace, readable: int) -> Lookup:
    """Look up a prompt before anything makes room for it.

    Args:
        cache: the cache.
        key: the prompt, int32.
        namespace: its own; no other one is looked at.
        readable: leading tokens that it may read.
    """
    page_size = cache.page_size
    if not cache.enabled:
        return Lookup(0, -1, page_size)
    # Its last token is computed in any case.
    match = cache.tree.match(key[:-TOKEN_BYTES], namespace)
    gone, now_s = cache.remember(), cache.tree.now()
    left = gone.find(key, len(match.pages), namespace)
    return Lookup(
        found=len(match.pages) * page_size + match.partial_rows,
        readable=readable,
        page_size=page_size,
        other=_other(cache, match, namespace),
        why=None if left is None else left.why,
        gone_s=0.0 if left is None else now_s - left.at_s,
        known_s=now_s - gone.since_s,
    )


def count_miss(cache: PagedCache, request: Request) -> None:
    """Count an admitted request's prompt tokens that were not cached, by reason, if leaving pages are remembered."""
    page = request.cached_tokens // cache.page_size
    if cache.gone is None or not request.strategy.keeps_prompts or page >= (request.prompt_len - 1) // cache.page_size:
        return
    left = cache.gone.find(request.key(request.prompt_len), page, request.namespace)
    cache.missed["new" if left is None else left.why] += request.prompt_len - request.cached_tokens


def _other(cache: PagedCache, match: Match, namespace: Namespace) -> bytes:
    """The first tokens with which a cached prompt goes on behind a match, the most recently used of some."""
    rows, node, page_bytes = match.partial_rows, match.partial_node, cache.page_size * TOKEN_BYTES
    if node is not None:
        start = node.pages.index(match.partial_page) * page_bytes + rows * TOKEN_BYTES
    elif match.node is not None and match.node_pages < len(match.node.pages):
        node, start = match.node, match.node_pages * page_bytes
    else:
        above = match.node or next((root for space, root in cache.tree.roots() if space == namespace), None)
        node, start = None if above is None else _latest(above), 0
    told = b""
    while node is not None and len(told) < _TOLD * TOKEN_BYTES:
        told += node.key[start : start + _TOLD * TOKEN_BYTES]
        node, start = _latest(node), 0
    return told[: _TOLD * TOKEN_BYTES]


def _latest(node: Node) -> Node | None:
    """A child; of many, one of those that came last."""
    some = islice(reversed(node.children.values()), _LOOKED_AT)
    return max(some, key=lambda child: child.used_s, default=None)

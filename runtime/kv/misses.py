"""A prompt's look-up in the cache, with the reason for a miss."""

from itertools import islice

from radix import Match, Namespace, Node, text
from radix.node import TOKEN_BYTES
from runtime.kv.cache import PagedCache
from runtime.protocol import Lookup

# Number of tokens to preview of the nearest cached prompt, and largest number of branches to choose it from.
_PREVIEW, _LOOKED_AT = 32, 64


def look_up(cache: PagedCache, key: bytes, namespace: Namespace, readable: int) -> Lookup:
    """Look up a prompt, before pages are evicted to make room for it.

    Args:
        cache: the cache.
        key: the prompt, int32.
        namespace: the prompt's namespace; no other one is searched.
        readable: number of leading tokens that the request may read.
    """
    page_size = cache.page_size
    if not cache.enabled:
        return Lookup(0, -1, page_size)
    # The last token is always computed.
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


def count_miss(cache: PagedCache, prompt: bytes, namespace: Namespace, cached_tokens: int) -> None:
    """Count a prompt's uncached tokens by reason of the miss, once leaving pages are remembered; `prompt`: int32."""
    length, page = len(prompt) // TOKEN_BYTES, cached_tokens // cache.page_size
    if cache.gone is None or page >= (length - 1) // cache.page_size:
        return
    left = cache.gone.find(prompt, page, namespace)
    cache.missed["new" if left is None else left.why] += length - cached_tokens


def _other(cache: PagedCache, match: Match, namespace: Namespace) -> bytes:
    """Preview tokens of the nearest prompt: int32, those with which it continues after the match."""
    rows, node, page_bytes = match.partial_rows, match.partial_node, cache.page_size * TOKEN_BYTES
    if node is not None:
        start = node.pages.index(match.partial_page) * page_bytes + rows * TOKEN_BYTES
        if start < page_bytes:  # other children may share as many rows
            node = (node.parent and _latest(node.parent, text(node.key)[:start])) or node
    elif match.node is not None and match.node_pages < len(match.node.pages):
        node, start = match.node, match.node_pages * page_bytes
    else:
        above = match.node or next((root for space, root in cache.tree.roots() if space == namespace), None)
        node, start = None if above is None else _latest(above), 0
    preview = b""
    while node is not None and len(preview) < _PREVIEW * TOKEN_BYTES:
        preview += text(node.key)[start : start + _PREVIEW * TOKEN_BYTES]
        node, start = _latest(node), 0
    return preview[: _PREVIEW * TOKEN_BYTES]


def _latest(node: Node, start: bytes = b"") -> Node | None:
    """The most recently used one of the newest children whose keys begin with `start`; None without one."""
    some = islice((child for child in reversed(node.children.values()) if not child.is_attached), _LOOKED_AT)
    return max((child for child in some if child.key.startswith(start)), key=lambda child: child.used_s, default=None)

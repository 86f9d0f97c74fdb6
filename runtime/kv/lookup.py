"""A prompt's look-up in the cache, with the reason for a miss."""

from itertools import islice

from radix import Match, Namespace, Node
from radix.node import TOKEN_BYTES
from runtime.kv.cache import PagedCache
from runtime.protocol import Lookup

# Tokens to preview of the nearest prompt, and most cached prompts from which it is chosen.
_TOLD, _LOOKED_AT = 32, 64


def look_up(cache: PagedCache, key: bytes, namespace: Namespace, readable: int) -> Lookup:
    """Look up a prompt before anything is evicted for it.

    Args:
        cache: the cache.
        key: the prompt, int32.
        namespace: the prompt's namespace, in which alone it is looked up.
        readable: leading tokens that the prompt may read.
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
    """Count the tokens of a prompt, int32, that were not cached, by reason, if leaving pages are remembered."""
    length, page = len(prompt) // TOKEN_BYTES, cached_tokens // cache.page_size
    if cache.gone is None or page >= (length - 1) // cache.page_size:
        return
    left = cache.gone.find(prompt, page, namespace)
    cache.missed["new" if left is None else left.why] += length - cached_tokens


def _other(cache: PagedCache, match: Match, namespace: Namespace) -> bytes:
    """Preview tokens of the nearest cached prompt, behind the match; the most recently used of some."""
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
    """The most recently used child, of the newest ones."""
    some = islice(reversed(node.children.values()), _LOOKED_AT)
    return max(some, key=lambda child: child.used_s, default=None)

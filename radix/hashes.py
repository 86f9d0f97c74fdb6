"""Chained hashes of pages. They identify cached pages in KV events and in the memory of evictions."""

from __future__ import annotations

from array import array
from itertools import takewhile

from xxhash import xxh64_intdigest

from radix.namespace import Namespace
from radix.node import Node, path


def block_hashes(tokens: bytes, block_bytes: int, parent: int | None, namespace: Namespace) -> tuple[int, ...]:
    """xxhash64 of each whole block, over the previous block's hash (at the root, the namespace's) and its tokens."""
    chained = xxh64_intdigest(namespace.to_bytes()) if parent is None else parent
    hashes = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        chained = xxh64_intdigest(chained.to_bytes(8, "little") + tokens[start : start + block_bytes])
        hashes.append(chained)
    return tuple(hashes)


def last_hash(node: Node | None) -> int | None:
    """The hash of a node's last page, which `node_hashes` has computed before; None for the root."""
    return node.hashes[-1] if node is not None and node.hashes is not None else None


def node_hashes(node: Node) -> array[int]:
    """The hashes of a node's pages. They are computed once, with those of its ancestors, and kept on the nodes."""
    for above in reversed(list(takewhile(lambda above: above.hashes is None, path(node)))):
        page_bytes = len(above.key) // len(above.pages)
        above.hashes = array("Q", block_hashes(above.key, page_bytes, last_hash(above.parent), above.namespace))
    assert node.hashes is not None
    return node.hashes

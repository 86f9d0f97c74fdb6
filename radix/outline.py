"""A large tree in few blocks: the heaviest branches in full, the others as a weight of what stands above them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest

from radix.node import TOKEN_BYTES, Node
from radix.tree import RadixTree

_SLICE = 4096


@dataclass(slots=True, eq=False)
class Block:
    """A node, or the root of a namespace, with the sum of what lies below it.

    Attributes:
        id: the node's first page id; -1 for a root.
        namespace: whose it is.
        start: tokens that stand before the run; tokens: in it, 0 for a root.
        total: tokens of the run and of everything below; nodes: likewise.
        hits: uses after the first.
        used_s: the tree's clock at the last use of the node or of anything below.
        locked, pinned, held: whether live requests keep it, or pins, or a hold.
        preview: int32 tokens at the run's start, as one bytes object.
        children: all of them; `outline` tells which are shown.
    """

    id: int
    namespace: str
    start: int
    tokens: int
    hits: int
    used_s: float
    locked: bool = False
    pinned: bool = False
    held: bool = False
    preview: bytes = b""
    total: int = 0
    nodes: int = 0
    children: list[Block] = field(default_factory=list)


def outline(
    tree: RadixTree, limit: int, preview_tokens: int = 0
) -> Generator[None, None, list[tuple[Block, int | None]]]:
    """Walk the whole tree, a few thousand nodes at a time; returns the `limit` heaviest blocks, parents first.

    Every block comes with its parent's place in the list, None for a root. A block that is shown has its parent shown.
    Between two steps the tree may change: what came or went meanwhile is counted or not, and nothing else goes wrong.
    """
    now = tree.now()
    blocks: list[Block] = []
    stack: list[tuple[Node, Block]] = []
    roots = []
    for namespace, root in tree.roots():
        roots.append(Block(-1, namespace, 0, 0, 0, 0.0))
        stack.extend((child, roots[-1]) for child in root.children.values())
    blocks.extend(roots)
    while stack:
        node, parent = stack.pop()
        if node.pages:
            block = _block(node, parent.start + parent.tokens, now, preview_tokens)
            parent.children.append(block)
            blocks.append(block)
            stack.extend((child, block) for child in node.children.values())
        if len(blocks) % _SLICE == 0:
            yield
    for number, block in enumerate(reversed(blocks)):
        # Children come after their parents, so they are summed up before them here.
        block.total = block.tokens + sum(child.total for child in block.children)
        block.nodes = (block.id >= 0) + sum(child.nodes for child in block.children)
        # Of a path that a pin and a request share, only its end tells that there is more than the pin.
        block.locked |= any(child.locked for child in block.children)
        block.used_s = max((child.used_s for child in block.children), default=block.used_s)
        if number % _SLICE == 0:
            yield
    return _heaviest(roots, limit)


def _block(node: Node, start: int, now: float, preview_tokens: int) -> Block:
    return Block(
        id=node.pages[0],
        namespace=node.namespace,
        start=start,
        tokens=len(node.key) // TOKEN_BYTES,
        hits=node.hits,
        used_s=node.used_s,
        locked=node.refs > node.pins,
        pinned=node.pins > 0,
        held=node.hold_until > now,
        preview=node.key[: preview_tokens * TOKEN_BYTES],
    )


def _heaviest(roots: list[Block], limit: int) -> list[tuple[Block, int | None]]:
    shown: list[tuple[Block, int | None]] = []
    # The second entry keeps the heap from comparing blocks.
    waiting: list[tuple[int, int, Block, int | None]] = []
    serial = 0

    def offer(blocks: list[Block], parent: int | None) -> None:
        nonlocal serial
        for block in nlargest(limit, blocks, key=lambda block: block.total):
            heappush(waiting, (-block.total, serial, block, parent))
            serial += 1

    offer(roots, None)
    while waiting and len(shown) < limit:
        _, _, block, parent = heappop(waiting)
        offer(block.children, len(shown))
        shown.append((block, parent))
    return shown

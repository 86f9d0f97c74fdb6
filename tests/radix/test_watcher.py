"""A watcher sees every victim while it is whole: its tokens from the root, its pages and its record."""

import random
from array import array

import pytest

from radix import POLICIES, Namespace, Quotas, RadixTree, make_policy, path
from radix.node import Node

T = Namespace("t")


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Shelf:
    """Keeps what it reads of the pages that leave, as a tier would."""

    def __init__(self):
        self.kept: dict[tuple[bytes, int], tuple[int, object]] = {}
        self.causes: list[tuple[int, str]] = []

    def stored(self, node: Node) -> None:
        assert node.pages

    def leaving(self, node: Node, kept_pages: int, cause: str) -> None:
        size = len(node.key) // len(node.pages)
        whole = b"".join(reversed([above.key for above in path(node)]))
        before = len(whole) - len(node.key)
        assert node.is_free_leaf
        for i in range(kept_pages, len(node.pages)):
            self.kept[whole[: before + (i + 1) * size], node.pages[i]] = node.meta
        self.causes.append((len(node.pages) - kept_pages, cause))


def filled(shelf: Shelf, **options) -> RadixTree:
    tree = RadixTree(1, watchers=(shelf,), **options)
    tree.insert(key(1, 2, 3, 4), array("i", [0, 1, 2, 3]), T, meta="record")
    tree.insert(key(1, 2, 9), array("i", [0, 1, 9]), T)
    return tree


def test_causes():
    shelf = Shelf()
    tree = filled(shelf, quotas=Quotas({"t": 4}))
    assert list(tree.make_room(T, 0)) == [3]
    assert shelf.causes == [(1, "quota")]
    assert list(tree.drop(tree.match(key(1, 2, 9), T).node)) == [9]
    assert sorted(tree.flush()) == [0, 1, 2]
    assert shelf.causes == [(1, "quota"), (1, "flush"), (1, "flush"), (2, "flush")]
    whole = {(key(1, 2, 3, 4), 3), (key(1, 2, 9), 9), (key(1, 2, 3), 2), (key(1, 2), 1), (key(1), 0)}
    assert set(shelf.kept) == whole
    assert shelf.kept[key(1), 0] == "record", "both parts of a run keep its record"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 3])
def test_every_page_that_leaves_was_seen_with_its_tokens(page_size, policy):
    draw, shelf, next_page = random.Random(page_size), Shelf(), 0
    tree = RadixTree(page_size, make_policy(policy, 50), quotas=Quotas({"t": 20}), watchers=[shelf])
    tokens_of: dict[int, bytes] = {}
    freed: list[int] = []
    for _ in range(3_000):
        tokens = array("i", [draw.randrange(3) for _ in range(draw.randrange(page_size, 8 * page_size))])
        namespace = draw.choice([Namespace(), T])
        count = len(tokens) // page_size
        pages = array("i", range(next_page, next_page + count))
        next_page += count
        _, held = tree.insert(tokens.tobytes(), pages, namespace)
        for i in range(count):
            if held[i] == pages[i]:
                tokens_of[pages[i]] = tokens[: (i + 1) * page_size].tobytes()
        kind = draw.randrange(4)
        if kind == 0:
            freed += tree.evict(draw.randrange(1, 9))
        elif kind == 1:
            freed += tree.make_room(namespace, draw.randrange(4))
        elif kind == 2:
            node = tree.match(tokens.tobytes(), namespace).node
            freed += tree.drop(draw.choice(list(path(node)))) if draw.random() < 0.2 else ()
    freed += tree.flush()
    assert {(tokens_of[page], page) for page in freed} == set(shelf.kept)
    assert len(freed) == len(shelf.kept) == sum(pages for pages, _ in shelf.causes)
    assert {cause for _, cause in shelf.causes} == {"room", "quota", "flush"}

"""Keys, and a tree that numbers its pages."""

from array import array

from radix import Match, Namespace, Policy, RadixTree
from radix.node import Node


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Tree(RadixTree):
    """A tree whose pages are numbered by itself, under a clock that is set by hand."""

    def __init__(self, page_size: int = 1, policy: Policy | None = None, **options):
        self.time, self.numbers = 0.0, 0
        super().__init__(page_size, policy, lambda: self.time, **options)

    def add(self, *tokens: int, namespace: Namespace = Namespace(), **options) -> Node:
        pages = array("i", range(self.numbers, self.numbers + len(tokens) // self.page_size))
        self.numbers += len(pages)
        return self.insert(key(*tokens), pages, namespace, **options)[0]

    def find(self, *tokens: int, namespace: Namespace = Namespace()) -> Match:
        return self.match(key(*tokens), namespace)

    def locked(self, *tokens: int) -> Node:
        return self.lock_match(self.find(*tokens))

"""The radix tree over token sequences: what is cached. Pure Python; can be lifted out and used alone."""

from radix.node import Node
from radix.tree import Match, RadixTree

__all__ = ["Match", "Node", "RadixTree"]

"""The radix tree over token sequences: what is cached. Pure Python; can be lifted out and used alone."""

from radix.node import Node
from radix.policy import POLICIES, Policy, make_policy
from radix.tree import Match, RadixTree

__all__ = ["POLICIES", "Match", "Node", "Policy", "RadixTree", "make_policy"]

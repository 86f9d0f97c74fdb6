"""The radix tree over token sequences: what is cached. It needs no torch and can be used without Ramet."""

from radix.attached import attached_key, nearest, text, text_of_path
from radix.events import Event, EventLog, Eviction, Evictions, Removed, Stored, Watcher
from radix.eviction import Outlook, Policy
from radix.gone import Gone, Left, WhyGone
from radix.hashes import block_hashes
from radix.holds import Holds
from radix.match import Match
from radix.namespace import Namespace
from radix.node import Meta, Node, path
from radix.policies import POLICIES, PolicyName, make_policy
from radix.quotas import Quotas
from radix.stats import Stats
from radix.tree import RadixTree

__all__ = [
    "POLICIES",
    "Event",
    "EventLog",
    "Eviction",
    "Evictions",
    "Gone",
    "Holds",
    "Left",
    "Match",
    "Meta",
    "Namespace",
    "Node",
    "Outlook",
    "Policy",
    "PolicyName",
    "Quotas",
    "RadixTree",
    "Removed",
    "Stats",
    "Stored",
    "Watcher",
    "WhyGone",
    "attached_key",
    "block_hashes",
    "make_policy",
    "nearest",
    "path",
    "text",
    "text_of_path",
]

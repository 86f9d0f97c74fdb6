"""Ids of the tree's nodes, as keys see them.

The engine's id of a node is its first page, and pages are handed out in order: they show how much others compute. Only
keys with `admin`, whose routes take these ids, see them. Others see a keyed digest, which is the same in all answers.
"""

from collections.abc import Callable
from hashlib import blake2b
from secrets import token_bytes

from server.auth.keys import Tenant

_SECRET = token_bytes(16)
# Digests are integers that JavaScript has exactly.
_BYTES = 6


def ids_for(asker: Tenant) -> Callable[[int], int]:
    """A function of the engine's id that returns the id which this key sees; roots keep -1."""
    if asker.admin:
        return lambda page: page
    person = blake2b(asker.account.encode(), digest_size=16).digest()

    def hidden(page: int) -> int:
        digest = blake2b(page.to_bytes(8, "little"), digest_size=_BYTES, key=_SECRET, person=person)
        return int.from_bytes(digest.digest(), "little")

    return lambda page: page if page < 0 else hidden(page)

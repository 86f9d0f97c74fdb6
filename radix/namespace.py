"""Namespaces: sequences in different ones never share a page."""

from __future__ import annotations

from typing import NamedTuple

# The kind of entries whose rows are approximate. No tier stores them.
APPROXIMATE = "fused"


class Namespace(NamedTuple):
    """A space of token sequences; `Namespace()` is the public one.

    Attributes:
        tenant: account of an API key; empty without one.
        salt: chosen by the client to keep its pages apart; empty without one.
        entry: `KIND:HASH` of a reuse entry, whose KV depends on more than the tokens before it; empty for prefixes.
        adapter: digest of the adapter that changes the weights; empty for the model itself.
    """

    tenant: str = ""
    salt: str = ""
    entry: str = ""
    adapter: str = ""

    @property
    def owner(self) -> Namespace:
        """The namespace whose quota pages count against: the tenant's, or without a tenant the salt's."""
        return Namespace(self.tenant, "" if self.tenant else self.salt)

    @property
    def without_entry(self) -> Namespace:
        """This namespace without its entry: the namespace of requests that use the entry."""
        return self._replace(entry="")

    def for_entry(self, kind: str, digest: str) -> Namespace:
        """The namespace of an entry in this one."""
        return self._replace(entry=f"{kind}:{digest}")

    def to_bytes(self) -> bytes:
        """Unambiguous bytes for hashing: each field preceded by its length; the adapter only if there is one."""
        fields = [field.encode("utf-8", "surrogatepass") for field in (self if self.adapter else self[:-1])]
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

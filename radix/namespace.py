"""Namespaces: sequences in different ones never share a page."""

from __future__ import annotations

from typing import NamedTuple


class Namespace(NamedTuple):
    """A space of token sequences; `Namespace()` is the public one.

    Attributes:
        tenant: account of an API key; empty without one.
        salt: chosen by the client.
        entry: `KIND:HASH` of an entry whose KV depends on more than the tokens before it; empty for exact prefixes.
        adapter: digest of the adapter that changes the weights; empty for the model itself.
    """

    tenant: str = ""
    salt: str = ""
    entry: str = ""
    adapter: str = ""

    @property
    def owner(self) -> Namespace:
        """The tenant whose quota its pages count against; without a tenant, each salt is one."""
        return Namespace(self.tenant, "" if self.tenant else self.salt)

    @property
    def without_entry(self) -> Namespace:
        """The namespace of the requests that use an entry."""
        return self._replace(entry="")

    def for_entry(self, kind: str, digest: str) -> Namespace:
        """The namespace of an entry in this one."""
        return self._replace(entry=f"{kind}:{digest}")

    def to_bytes(self) -> bytes:
        """An unambiguous form for hashing: every field behind its length; the adapter only if there is one."""
        fields = [field.encode("utf-8", "surrogatepass") for field in (self if self.adapter else self[:-1])]
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

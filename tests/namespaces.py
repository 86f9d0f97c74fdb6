"""Namespaces for tests that nothing is shared between two of them."""

from radix import Namespace


def others(space: Namespace) -> list[Namespace]:
    """Namespaces that differ from one in a single part: what forgets a part of the key takes one for the other."""
    return [space._replace(**{part: f"{value}x"}) for part, value in space._asdict().items()]

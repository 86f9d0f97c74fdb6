"""Parts that features put into the prompts of bodies, and the stores that have some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Protocol, TypeVar

from server.http.body import Body
from server.http.context import provided

T = TypeVar("T")


class Stores:
    """What features store for clients: one store of each class."""

    def __init__(self, kinds: Iterable[type[Any]]):
        self._by_kind = {kind: kind() for kind in kinds}

    def __getitem__(self, kind: type[T]) -> T:
        return self._by_kind[kind]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_kind.values())


FeatureStores = Annotated[Stores, provided(Stores)]


class FoundPart(Protocol):
    """A part of a prompt."""

    @property
    def content(self) -> str:
        """The part as plain text."""


class GivenPart(Protocol):
    """A part as a request gives it, among the texts of a turn's content."""

    @property
    def num_characters(self) -> int:
        """Without what is stored."""

    def found(self, account: str, stores: Stores) -> FoundPart:
        """The part itself; thread-safe. Raises NotFound."""


class FeaturePart(Body):
    """Base of the parts of messages that are no text. Their field `type` is a literal.

    Attributes:
        given: what the turn's content has in its place; None: nothing, as the feature looks for it itself.
    """

    @property
    def given(self) -> GivenPart | None:
        return None

    def check(self, role: str) -> None:
        """Raise ValueError if messages of this role cannot have such a part."""


def find_parts(turns: list[dict[str, Any]], account: str, stores: Stores) -> list[dict[str, Any]]:
    """Turns with parts in place of the request's parts; thread-safe. Raises NotFound."""

    def found(part: str | GivenPart) -> str | FoundPart:
        return part if isinstance(part, str) else part.found(account, stores)

    several = (turn["content"] for turn in turns)
    contents = [content if isinstance(content, str) else [*map(found, content)] for content in several]
    return [{**turn, "content": content} for turn, content in zip(turns, contents, strict=True)]

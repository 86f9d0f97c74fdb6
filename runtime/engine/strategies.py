"""The strategies of an engine, by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

from runtime.asks import ReuseAsk
from runtime.errors import InvalidRequest
from runtime.request import AnyStrategy, Strategy

Asked = TypeVar("Asked", bound=ReuseAsk | None)


class Strategies(Mapping[str, AnyStrategy]):
    """The strategies that an engine has. Those of features are opened when they are first asked for.

    So an engine whose requests ask for no feature imports none of its code.

    Attributes:
        default: serves requests that ask for nothing.
        opened: the strategies that have been opened, by name.
    """

    def __init__(self, default: Strategy[None], openers: Mapping[str, Callable[[], AnyStrategy]] | None = None):
        self.default, self._openers = default, openers or {}
        self.opened: dict[str, AnyStrategy] = {default.name: default}

    def __getitem__(self, name: str) -> AnyStrategy:
        if name not in self.opened:
            self.opened[name] = self._openers[name]()
        return self.opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self.opened or name in self._openers

    def __iter__(self) -> Iterator[str]:
        return iter((self.default.name, *self._openers))

    def __len__(self) -> int:
        return 1 + len(self._openers)

    def serving(self, ask: Asked) -> Strategy[Asked]:
        """The strategy that serves an `AddRequest.ask`. Raises InvalidRequest if there is none."""
        name = self.default.name if ask is None else str(ask.__struct_config__.tag)
        if name not in self:
            raise InvalidRequest(f"no reuse method {name!r} for this model", param="reuse.method")
        return cast("Strategy[Asked]", self[name])  # the tag of an ask names the strategy for its type

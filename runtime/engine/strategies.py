"""The strategies of an engine, by name."""

from collections.abc import Callable, Iterator, Mapping

from runtime.asks import ReuseAsk
from runtime.errors import InvalidRequest
from runtime.request import Strategy


class Strategies(Mapping[str, Strategy]):
    """The strategies that an engine has. Those of features are opened when they are first asked for.

    So an engine whose requests ask for no feature imports none of its code.

    Attributes:
        default: serves requests that ask for nothing.
        opened: the strategies that have been opened, by name.
    """

    def __init__(self, default: Strategy, openers: Mapping[str, Callable[[], Strategy]] | None = None):
        self.default, self._openers = default, openers or {}
        self.opened: dict[str, Strategy] = {default.name: default}

    def __getitem__(self, name: str) -> Strategy:
        if name not in self.opened:
            self.opened[name] = self._openers[name]()
        return self.opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter((self.default.name, *self._openers))

    def __len__(self) -> int:
        return 1 + len(self._openers)

    def serving(self, ask: ReuseAsk | None) -> Strategy:
        """The strategy that serves an `AddRequest.ask`. Raises InvalidRequest if there is none."""
        if ask is None:
            return self.default
        name = str(ask.__struct_config__.tag)
        if name not in self:
            raise InvalidRequest(f"no reuse method {name!r} for this model", param="reuse.method")
        return self[name]

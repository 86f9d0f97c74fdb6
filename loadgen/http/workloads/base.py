"""The interface of a workload."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from loadgen.http.lengths import Distribution
from loadgen.http.prose import Prose
from loadgen.http.session import Session


@dataclass(frozen=True)
class Source:
    """Random numbers and text of one seed."""

    rng: random.Random
    prose: Prose


class Workload(ABC):
    """A kind of requests. A subclass is a frozen dataclass whose fields are options of the command line.

    Attributes:
        TIMED: whether its sessions have start times (`Session.at_s`).
        API: its default API.
    """

    TIMED: ClassVar[bool] = False
    API: ClassVar[str] = "completions"

    @abstractmethod
    def sessions(self, source: Source) -> Iterator[Session]:
        """The sessions. Synthetic workloads never end; recorded ones end with their file."""

    def prefixes(self, source: Source) -> Iterator[Session]:
        """A request for each prefix that the sessions of an equal source share; none where nothing can be told."""
        yield from ()

    def requests(self, concurrency: int) -> int | None:
        """Default number of requests of a run; None for recorded workloads, which have an end of their own."""
        return max(32, 4 * concurrency)


def length(text: str) -> Distribution:
    """A default length, in the notation of the command line."""
    return Distribution.parse(text)


def need_file(path: Path) -> None:
    """Raise ValueError if there is no such file. Called before any request is sent."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")

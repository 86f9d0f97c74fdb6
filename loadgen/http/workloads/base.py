"""The interface of a workload."""

from __future__ import annotations

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
    """A kind of requests. A subclass is a frozen dataclass; its fields are options of the command line.

    Attributes:
        TIMED: whether its sessions say at which time they begin (`Session.at_s`).
        API: the route to which they go, unless the user says another.
    """

    TIMED: ClassVar[bool] = False
    API: ClassVar[str] = "completions"

    @abstractmethod
    def sessions(self, source: Source) -> Iterator[Session]:
        """The sessions. Synthetic workloads never end; recorded ones end with their file."""

    @property
    def requests(self) -> int | None:
        """Number of requests in one round of the workload; None for recorded ones, which have an end of their own."""
        return 100


def length(text: str) -> Distribution:
    """A default length, in the notation of the command line."""
    return Distribution.parse(text)


def need_file(path: Path) -> None:
    """Raise ValueError where there is no such file: before a server is asked anything."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")

"""What every workload is."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen.http.lengths import Distribution
from loadgen.http.prose import Prose
from loadgen.http.session import Session


@dataclass(frozen=True)
class Source:
    """Where a workload's chance and text come from; all of it follows from one seed."""

    rng: random.Random
    prose: Prose


class Workload(ABC):
    """A kind of requests. A subclass is a dataclass whose fields are its options on the command line."""

    @abstractmethod
    def sessions(self, source: Source) -> Iterator[Session]:
        """The sessions. Synthetic workloads never end; recorded ones end with their file."""

    @property
    def requests(self) -> int | None:
        """How many requests make one round of the workload; None for recorded ones, which have their own end."""
        return 100


def length(text: str) -> Distribution:
    """A default length, in the notation of the command line."""
    return Distribution.parse(text)


def need_file(path: Path) -> None:
    """Raise ValueError where there is none: before a server is asked anything."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")

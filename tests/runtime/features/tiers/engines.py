"""Engines with tiers, and prompts for them."""

import random
from pathlib import Path
from typing import Any

from radix import path
from runtime.engine.core import EngineCore
from runtime.features.tiers.tiering import Tiering
from tests.runtime.engine.driver import Driver, make_core
from tests.tiny import VOCAB

NEW = 4


def options_of(tier: str, directory: Path) -> dict[str, Any]:
    """Options of an engine with one tier."""
    return {
        "host": {"host_memory": 0.1},
        "disk": {"disk_cache": directory / "disk"},
        "store": {"kv_store": f"dir:{directory / 'store'}"},
    }[tier]


def open_core(model: Path, **options: Any) -> EngineCore:
    """A core that loads whatever a tier has, whether that is quicker or not."""
    options = {"page_size": 8, "pool_tokens": 1024, "kernels": "torch"} | options
    core = make_core(model, **options)
    always(core)
    return core


def always(core: EngineCore) -> None:
    """Let no measured rate advise against a load."""
    core.part(Tiering).tiers.computed = lambda rows, seconds: None


def evict(core: EngineCore) -> None:
    """Evict all that can be, as if there were no room, and wait until it is written."""
    core.cache.allocator.release(core.cache.tree.evict(core.cache.tree.num_pages))
    core.part(Tiering).tiers.worker.drain()


def draw(seed: int, count: int) -> list[int]:
    """Random tokens."""
    return [random.Random(f"{seed} {i}").randrange(VOCAB) for i in range(count)]


def loaded(driver: Driver, rid: str) -> dict[str, int]:
    """Tokens that were loaded for a request, by tier."""
    return driver.events[rid][0].admission.loaded_tokens


def held_tokens(core: EngineCore, node: Any) -> int:
    """Tokens from the root to the end of a node."""
    return sum(len(above.pages) for above in path(node)) * core.cache.page_size

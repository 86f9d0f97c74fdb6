"""Depth tables (BiCache, section 5.1): the number of layers in which a prefix is reused, by its share of a request."""

import hashlib
import json
import logging
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.models.adapters.merge import DEPTH_TABLE_FILE
from runtime.models.config_json import read_json
from runtime.models.spec import ModelSpec

log = logging.getLogger("ramet.engine")

_PUBLISHED = Path(__file__).with_name("depth_tables")


@dataclass(frozen=True, slots=True)
class DepthTable:
    """The number of leading layers in which a prefix is reused, by ratio.

    Attributes:
        name: origin of the table, for display.
        depths: depth by ratio: the prefix's share of prompt and output, in percent. A ratio uses the nearest key below.
        similarity: measured cosine similarity of each layer, by the same keys.
        interval: the paper's R that was measured with these depths: denoising steps between refreshes; None: not given.
    """

    name: str
    depths: dict[int, int]
    similarity: dict[int, tuple[float, ...]] = field(default_factory=dict)
    interval: int | None = None

    @property
    def version(self) -> str:
        """The table's name and a hash of its depths."""
        digest = hashlib.blake2b(json.dumps(self.depths, sort_keys=True).encode(), digest_size=4)
        return f"{self.name}#{digest.hexdigest()}"

    def depth(self, ratio: float) -> int:
        """The depth for a ratio of 0 to 1; 0 below the smallest key."""
        keys = sorted(self.depths)
        # 29 / 100 * 100 is a little less than 29.
        at = bisect_right(keys, ratio * 100 + 1e-6)
        return self.depths[keys[at - 1]] if at else 0


# The KV of the first layer depends on no other token, so reusing it is exact.
NO_TABLE = DepthTable("none: depth 1", {0: 1})


def read_table(path: Path, spec: ModelSpec) -> DepthTable:
    """Read a table. Raises ModelError if the file is invalid or for another model."""
    return _from_json(read_json(path), path, spec)


def _from_json(value: dict[str, Any], path: Path, spec: ModelSpec) -> DepthTable:
    if value.get("model") != spec.identity:
        raise ModelError(f"the depth table {path} is for {value.get('model')}; the model is {spec.identity}")
    try:
        depths = {int(ratio): int(depth) for ratio, depth in value["depths"].items()}
        similarity = {int(ratio): tuple(map(float, row)) for ratio, row in (value.get("similarity") or {}).items()}
        interval = None if value.get("refresh_interval") is None else int(value["refresh_interval"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"the depth table {path} cannot be read: {error}") from None
    if not depths or not all(0 <= depth <= spec.num_layers for depth in depths.values()):
        raise ModelError(f"the depth table {path} must have depths of 0 to {spec.num_layers}")
    if interval is not None and interval < 1:
        raise ModelError(f"the depth table {path} must have a refresh_interval of at least 1")
    return DepthTable(str(value.get("name") or path.name), depths, similarity, interval)


def choose_table(given: Path | None, directory: Path, spec: ModelSpec) -> DepthTable:
    """The given table, else the model's own, else a published one for this model, else depth 1 with a warning.

    Raises:
        ModelError: if the given table or the model's own is invalid.
    """
    if given is not None:
        return read_table(given, spec)
    if (own := directory / DEPTH_TABLE_FILE).exists():
        return read_table(own, spec)
    for path in sorted(_PUBLISHED.glob("*.json")):
        value = read_json(path)
        if value["model"] == spec.identity:
            return _from_json(value, path, spec)
    log.warning(
        "no depth table for this model: prefixes are reused in the first layer only and refreshed at every step, which "
        "is exact; measure a table with `ramet profile --model MODEL --out table.json` and pass it with --depth-table"
    )
    return NO_TABLE

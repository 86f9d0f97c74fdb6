"""From samples to a depth table: the paper's rule, and its calibration against the model's own outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.models.spec import ModelSpec
from runtime.reuse.bicache.profile.probe import Probe
from runtime.reuse.bicache.profile.records import Records
from runtime.reuse.bicache.profile.samples import SampleSource
from runtime.reuse.bicache.profile.settings import ProfileSettings


class Profiler:
    """Measures one model.

    A threshold for the cosine is not universal: rows can carry the context in a few directions that hardly change a
    cosine over all of them. So rule `kl` lowers the paper's depth until the distributions of the masks diverge by no
    more than a bound. That takes no labels.
    """

    def __init__(
        self,
        probe: Probe,
        samples: SampleSource,
        settings: ProfileSettings,
        records: Records,
        before: Callable[[], None] = lambda: None,
    ):
        """`before` is called before each measurement; its exception ends the profile, which can be resumed."""
        self.probe, self.samples, self.settings, self.records = probe, samples, settings, records
        self._before = before

    def run(self) -> dict[str, Any]:
        """Take the measurements that `records` lack; returns the table as a JSON object."""
        settings, shares = self.settings, (100, *self.settings.kept)
        cells = len(shares) * len(settings.ratios)
        with tqdm(total=cells * settings.samples, desc="similarity", unit="request") as bar:
            raw = {kept: {ratio: self._similarities(kept, ratio, bar) for ratio in settings.ratios} for kept in shares}
        with tqdm(total=cells, desc="divergence", unit="ratio", disable=settings.rule != "kl") as bar:
            whole, *truncated = (self._part(kept, raw[kept], bar) for kept in shares)
        return {
            "name": f"profiled, {settings.rule}",
            "model": self.probe.executor.spec.identity,
            "settings": settings.model_dump(),
            **whole,
            "truncated": dict(zip(settings.kept, truncated, strict=True)),
        }

    def _similarities(self, kept: int, ratio: int, bar: tqdm) -> list[list[list[float]]]:
        """For each sample both cosines by layer, see `Probe.similarity`."""
        found = []
        for number in range(self.settings.samples):
            key = ["similarity", kept, ratio, number]
            value = self.records.get(key)
            if value is None:
                self._before()
                value = [*self.probe.similarity(self.samples.sample(ratio, number, kept))]
                self.records.put(key, value)
            found.append(value)
            bar.update()
        return found

    def _part(self, kept: int, both: dict[int, list[list[list[float]]]], bar: tqdm) -> dict[str, Any]:
        """Depths and measurements for encodings of which `kept` percent match."""
        by_cosine = [{ratio: [pair[i] for pair in pairs] for ratio, pairs in both.items()} for i in (0, 1)]
        depths = [{n: paper_depth(rows, self.settings.threshold) for n, rows in raw.items()} for raw in by_cosine]
        raw, cosine = by_cosine[self.settings.per_token], depths[self.settings.per_token]
        chosen, divergence = cosine, {}
        if self.settings.rule == "kl":
            found = {ratio: self._calibrate(kept, ratio, depth, bar) for ratio, depth in cosine.items()}
            chosen = {ratio: depth for ratio, (depth, _) in found.items()}
            divergence = {ratio: measured for ratio, (_, measured) in found.items()}
        return {
            # Below the smallest ratio the first layer is exact all the same.
            "depths": {0: 1, **chosen},
            "depths_cosine": {0: 1, **cosine},
            "by_cosine": {
                name: {"depths": of, "similarity": {n: _mean(rows) for n, rows in each.items()}}
                for name, of, each in zip(("all tokens", "token by token"), depths, by_cosine, strict=True)
            },
            "similarity": {ratio: _mean(rows) for ratio, rows in raw.items()},
            "divergence": divergence,
            "raw_similarity": {ratio: np.round(rows, 5).tolist() for ratio, rows in raw.items()},
        }

    def _calibrate(self, kept: int, ratio: int, depth: int, bar: tqdm) -> tuple[int, dict[int, float]]:
        """The largest depth up to `depth` within the bound, by bisection, and the divergences measured, by depth.

        Divergence grows with depth. Depth 1 is exact and is not measured.
        """
        low, high = 1, depth + 1
        measured: dict[int, float] = {}
        middle = depth
        while high - low > 1:
            measured[middle] = self._divergence(kept, ratio, middle)
            if measured[middle] <= self.settings.kl_bound:
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        bar.update()
        return low, measured

    def _divergence(self, kept: int, ratio: int, depth: int) -> float:
        """The mean divergence over samples."""
        settings, found = self.settings, []
        for number in range(min(settings.kl_samples, settings.samples)):
            key = ["divergence", kept, ratio, depth, number]
            value = self.records.get(key)
            if value is None:
                self._before()
                sample = self.samples.sample(ratio, number, kept)
                value = self.probe.divergence(sample, depth, settings.kl_steps)
                self.records.put(key, value)
            found.append(value)
        return float(np.mean(found))


def _mean(rows: list[list[float]]) -> list[float]:
    return np.mean(rows, axis=0).round(5).tolist()


def paper_depth(similarities: list[list[float]], threshold: float) -> int:
    """Mean over samples, rounded down, of the number of leading layers with at least `threshold`; 1 at least."""
    shallow = np.logical_and.accumulate(np.array(similarities) >= threshold, axis=1)
    return max(int(shallow.sum(axis=1).mean()), 1)


def header(spec: ModelSpec, settings: ProfileSettings, prefix: Path | None, prompts: Path | None) -> dict[str, Any]:
    """The settings that a profile's measurements depend on; those that are applied afterwards do not count."""
    kept = settings.model_dump(exclude={"threshold", "per_token", "rule", "kl_bound"})
    return {"model": spec.identity, "settings": kept, "prefix": str(prefix), "prompts": str(prompts)}

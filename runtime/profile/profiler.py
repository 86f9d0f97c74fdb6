"""From samples to a depth table: the paper's rule, and its calibration against the model's own outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.models.spec import ModelSpec
from runtime.profile.probe import Probe
from runtime.profile.records import Records
from runtime.profile.samples import Samples
from runtime.profile.settings import ProfileSettings
from runtime.reuse.depth import identity


class Profiler:
    """Measures one model.

    A threshold for the cosine is not universal: rows can carry what the others told them in a few directions that a
    cosine over everything does not see. So the depth that the paper's rule gives is lowered, where that is wanted,
    until the distributions of the masks diverge by no more than a bound. That takes no labels.
    """

    def __init__(self, probe: Probe, samples: Samples, settings: ProfileSettings, records: Records):
        self.probe, self.samples, self.settings, self.records = probe, samples, settings, records
        self._divergences: dict[int, dict[int, float]] = {}

    def run(self) -> dict[str, Any]:
        """Measure what `records` do not have yet; the table as a JSON object."""
        settings = self.settings
        total = len(settings.ratios) * settings.samples
        with tqdm(total=total, desc="similarity", unit="request") as bar:
            raw = {ratio: self._similarities(ratio, bar) for ratio in settings.ratios}
        cosine = {ratio: paper_depth(rows, settings.threshold) for ratio, rows in raw.items()}
        chosen = cosine
        if settings.rule == "kl":
            with tqdm(total=len(settings.ratios), desc="divergence", unit="ratio") as bar:
                chosen = {ratio: self._calibrate(ratio, cosine[ratio], bar) for ratio in settings.ratios}
        return self._table(raw, cosine, chosen)

    def _similarities(self, ratio: int, bar: tqdm) -> list[list[float]]:
        found = []
        for number in range(self.settings.samples):
            value = self.records.get("similarity", ratio, number)
            if value is None:
                value = self.probe.similarity(self.samples.sample(ratio, number), self.settings.per_token)
                self.records.put(value, "similarity", ratio, number)
            found.append(value)
            bar.update()
        return found

    def _calibrate(self, ratio: int, depth: int, bar: tqdm) -> int:
        """The largest depth up to `depth` within the bound, by bisection: divergence grows with depth.

        Depth 1 is exact and needs no look.
        """
        low, high = 1, depth + 1
        middle = depth
        while high - low > 1:
            if self._divergence(ratio, middle) <= self.settings.kl_bound:
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        bar.update()
        return low

    def _divergence(self, ratio: int, depth: int) -> float:
        """The mean over samples."""
        settings, found = self.settings, []
        for number in range(min(settings.kl_samples, settings.samples)):
            value = self.records.get("divergence", ratio, depth, number)
            if value is None:
                value = self.probe.divergence(self.samples.sample(ratio, number), depth, settings.kl_steps)
                self.records.put(value, "divergence", ratio, depth, number)
            found.append(value)
        mean = float(np.mean(found))
        self._divergences.setdefault(ratio, {})[depth] = mean
        return mean

    def _table(
        self, raw: dict[int, list[list[float]]], cosine: dict[int, int], chosen: dict[int, int]
    ) -> dict[str, Any]:
        settings = self.settings
        return {
            "name": f"profiled, {settings.rule}",
            "model": identity(self.probe.executor.spec),
            "settings": settings.model_dump(),
            # Below the smallest ratio the first layer is exact all the same.
            "depths": {0: 1, **chosen},
            "depths_cosine": {0: 1, **cosine},
            "similarity": {ratio: np.mean(rows, axis=0).round(5).tolist() for ratio, rows in raw.items()},
            "divergence": self._divergences,
            "raw_similarity": {ratio: np.round(rows, 5).tolist() for ratio, rows in raw.items()},
        }


def paper_depth(similarities: list[list[float]], threshold: float) -> int:
    """Mean over samples, rounded down, of the number of leading layers with at least `threshold`; 1 at least."""
    shallow = np.logical_and.accumulate(np.array(similarities) >= threshold, axis=1)
    return max(int(shallow.sum(axis=1).mean()), 1)


def header(spec: ModelSpec, settings: ProfileSettings, prefix: Path | None, prompts: Path | None) -> dict[str, Any]:
    """What the measurements of a profile depend on; the thresholds, which are applied afterwards, are left out."""
    kept = settings.model_dump(exclude={"threshold", "rule", "kl_bound"})
    return {"model": identity(spec), "settings": kept, "prefix": str(prefix), "prompts": str(prompts)}

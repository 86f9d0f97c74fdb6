"""Measures a depth table: by the paper's rule, then calibrated with the model's own outputs."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from loadgen.harness import BenchError, Cell, Results
from loadgen.harness.machine import machine
from loadgen.harness.plots import drawing
from loadgen.offline.profile.probe import Probe
from loadgen.offline.profile.samples import Sample, Samples
from loadgen.offline.profile.settings import DepthSettings, ProfileFiles
from runtime.config import Config
from runtime.errors import ModelError
from runtime.execution.building import build_executor
from runtime.features.diffusion.published import read_spec
from runtime.models.resolve import resolve_model
from runtime.models.spec import DecoderSpec, ModelSpec
from runtime.models.tokenizer import Tokenizer

_LINES = {"depths_cosine": ("w--", "depth by the paper's rule"), "depths": ("r-", "depth in the table")}


class Profiler:
    """Measures one model.

    No threshold of the cosine suits all models: context may change a few directions of a row, which hardly changes
    its cosine. So rule `kl` lowers the paper's depth until the distributions at the masks diverge by at most a bound.
    That needs no labels.
    """

    def __init__(
        self,
        probe: Probe,
        samples: Samples,
        settings: DepthSettings,
        results: Results,
    ):
        self.probe, self.samples, self.settings, self.results = probe, samples, settings, results

    def run(self) -> dict[str, Any]:
        """Measure what `results` lacks; returns the table as a JSON object."""
        settings = self.settings
        with tqdm(total=len(settings.ratios) * settings.samples, desc="similarity", unit="request") as bar:
            raw = {ratio: self._similarities(ratio, bar) for ratio in settings.ratios}
        with tqdm(total=len(settings.ratios), desc="divergence", unit="ratio", disable=settings.rule != "kl") as bar:
            found = self._depths(raw, bar)
        return {
            "name": f"profiled, {settings.rule}",
            "model": self.probe.executor.spec.identity,
            "settings": settings.model_dump(),
            **found,
        }

    def _similarities(self, ratio: int, bar: tqdm) -> list[list[list[float]]]:
        """For each sample, both cosines by layer, see `Probe.similarity`."""
        found = []
        for number in range(self.settings.samples):
            found.append(self._measured({"ratio": ratio}, number, lambda sample: [*self.probe.similarity(sample)]))
            bar.update()
        return found

    def _measured(self, cell: Cell, number: int, measure: Callable[[Sample], Any]) -> Any:
        """A sample's measurement: the recorded one, or a new one, which is then recorded."""
        if not self.results.has(cell, number):
            value = measure(self.samples.sample(cell["ratio"], number))
            self.results.add(cell, number, {"value": value})
        return self.results.of(cell)[number]["value"]

    def _depths(self, both: dict[int, list[list[list[float]]]], bar: tqdm) -> dict[str, Any]:
        """Depths and measurements by ratio; `both`: by ratio, for each sample both cosines by layer."""
        by_cosine = [{ratio: [pair[i] for pair in pairs] for ratio, pairs in both.items()} for i in (0, 1)]
        depths = [{n: paper_depth(rows, self.settings.threshold) for n, rows in raw.items()} for raw in by_cosine]
        raw, cosine = by_cosine[self.settings.per_token], depths[self.settings.per_token]
        chosen, divergence = cosine, {}
        if self.settings.rule == "kl":
            found = {ratio: self._calibrate(ratio, depth, bar) for ratio, depth in cosine.items()}
            chosen = {ratio: depth for ratio, (depth, _) in found.items()}
            divergence = {ratio: measured for ratio, (_, measured) in found.items()}
        return {
            # Depth 1 is exact at any ratio, so also below the smallest one.
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

    def _calibrate(self, ratio: int, depth: int, bar: tqdm) -> tuple[int, dict[int, float]]:
        """The largest depth up to `depth` whose divergence is within the bound, and the measured divergences by depth.

        It bisects, since divergence grows with depth. Depth 1 is exact and is not measured.
        """
        low, high = 1, depth + 1
        measured: dict[int, float] = {}
        middle = depth
        while high - low > 1:
            measured[middle] = self._divergence(ratio, middle)
            if measured[middle] <= self.settings.kl_bound:
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        bar.update()
        return low, measured

    def _divergence(self, ratio: int, depth: int) -> float:
        """The mean divergence over all samples."""
        settings, cell = self.settings, {"ratio": ratio, "depth": depth}

        def measure(sample: Sample) -> float:
            return self.probe.divergence(sample, depth, settings.kl_steps)

        numbers = range(min(settings.kl_samples, settings.samples))
        return float(np.mean([self._measured(cell, number, measure) for number in numbers]))


def _mean(rows: list[list[float]]) -> list[float]:
    return np.mean(rows, axis=0).round(5).tolist()


def paper_depth(similarities: list[list[float]], threshold: float) -> int:
    """The number of leading layers with at least `threshold`: mean over samples, rounded down, at least 1."""
    shallow = np.logical_and.accumulate(np.array(similarities) >= threshold, axis=1)
    return max(int(shallow.sum(axis=1).mean()), 1)


def profile_depths(config: Config, settings: DepthSettings, files: ProfileFiles) -> None:
    """Measure a diffusion model, write table and heat map, and print the table. Raises ModelError."""
    path = resolve_model(config.model)
    spec = DecoderSpec.load(path)
    if (diffusion := read_spec(path)) is None:
        raise ModelError(f"{spec.architecture} is no diffusion model: its prefixes are reused in all layers")
    if settings.length > spec.context_length:
        raise ModelError(f"--length is {settings.length}; the model's context is {spec.context_length}")
    tokenizer = Tokenizer.load(path)
    prompts = [line for line in _read(files.prompts).splitlines() if line.strip()]
    samples = Samples(
        tokenizer.encode, _read(files.prefix), prompts, settings.length, settings.gen_length, settings.seed
    )
    partial = files.out.with_name(files.out.name + ".partial")
    results = open_results(partial, _header(spec, settings, files), settings.seed)
    cache = config.cache.model_copy(update={"page_size": 1, "pool_tokens": 3 * settings.length})
    probe = Probe(build_executor(config.model_copy(update={"cache": cache}), path), diffusion)
    table = Profiler(probe, samples, settings, results).run()
    files.out.write_text(json.dumps(table) + "\n", encoding="utf-8")
    if files.plot:
        _draw_heat_map(table, files.plot)
    partial.unlink()
    _print(table)


def open_results(path: Path, options: dict[str, Any], seed: int) -> Results:
    """Open or create a file of measurements. Raises ModelError if the file has other options."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"bench": "profile", "options": options, "seed": seed, "machine": machine(), "started": started}
    results = Results(facts, (), path=path)
    try:
        results.begin_file(resume=True)
    except BenchError as error:
        raise ModelError(f"{error}; remove it to begin anew") from None
    return results


def _header(spec: ModelSpec, settings: DepthSettings, files: ProfileFiles) -> dict[str, Any]:
    """The settings that the measurements depend on."""
    kept = settings.model_dump(exclude={"threshold", "per_token", "rule", "kl_bound"})
    return {"model": spec.identity, "settings": kept, "prefix": str(files.prefix), "prompts": str(files.prompts)}


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None


def _print(table: dict[str, Any]) -> None:
    print("ratio %  cosine of all tokens  token by token  table")
    both = [part["depths"] for part in table["by_cosine"].values()]
    for ratio, depth in table["depths"].items():
        if ratio:
            print(f"{ratio:7}  {both[0][ratio]:20}  {both[1][ratio]:14}  {depth:5}")


def _draw_heat_map(table: dict[str, Any], path: Path) -> None:
    """Draw the similarity by layer and ratio, and the depths as lines."""
    ratios = list(table["similarity"])
    values = np.array([table["similarity"][ratio] for ratio in ratios]).T
    with drawing(path, (8, 5)) as axes:
        image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis", vmin=min(values.min(), 0.9), vmax=1)
        axes.figure.colorbar(image, label="cosine similarity of the prefix's KV")
        columns = range(len(ratios))
        for rule, (style, label) in _LINES.items():
            axes.step(columns, [table[rule][ratio] - 0.5 for ratio in ratios], style, where="mid", label=label)
        axes.set_xticks(columns, [str(ratio) for ratio in ratios])
        axes.set_yticks(range(0, len(values), max(len(values) // 10, 1)))
        axes.set_yticklabels([str(layer + 1) for layer in axes.get_yticks().astype(int)])
        axes.set(xlabel="shared part of the request, %", ylabel="layer")
        axes.legend(loc="upper left")

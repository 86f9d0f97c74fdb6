"""The compared treatments of a shared prefix, as parameters of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.params import DiffusionParams

# Rows with which others are compared.
NO_CACHE = "no cache"
WITHIN = "refreshed within the request (d = 0)"
BICACHE = "BiCache"
BY_TABLE = "BiCache by its table"
# Fast-dLLM's two caches, and each with BiCache under it.
COMBINED = {
    "Fast-dLLM, prefix cache": "BiCache + Fast-dLLM, prefix cache",
    "Fast-dLLM, dual cache": "BiCache + Fast-dLLM, dual cache",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of all cases.

    Attributes:
        room: tokens of the canvas.
        steps: denoising steps, unless a threshold ends them sooner.
        block: block length of the Fast-dLLM cases; the others have one block.
        interval: R, steps between refreshes.
        threshold: confidence at which the Fast-dLLM cases decide a token.
        depth: layers that BiCache reuses; None: by the model's table.
        layers: of the model.
    """

    room: int
    steps: int
    block: int
    interval: int
    threshold: float
    depth: int | None
    layers: int


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        name: in the table.
        fields: of `DiffusionParams`, without the prefix's length.
        value: its x in a sweep; of a rule the divergence in nats, if that is not measured while serving.
        cold: whether the cache is empty at first, so that encoding the prefix, and measuring, are on the clock.
    """

    name: str
    fields: dict[str, object]
    value: float = 0.0
    cold: bool = False

    @property
    def is_reusing(self) -> bool:
        """Whether the prefix is encoded first."""
        return self.fields.get("reuse") is not False

    def params(self, prefix_tokens: int) -> DiffusionParams:
        """The parameters of a request with a prefix of that length."""
        return DiffusionParams.model_validate({**self.fields, "prefix_tokens": prefix_tokens})


def table_cases(plan: Plan) -> list[Case]:
    """The rows of the paper's Table 1, and further ablations.

    Fast-dLLM alone refreshes the prefix once in each block, as published; with BiCache under it, the prefix's deep
    layers are refreshed at most once in `interval` steps, at the beginning of a block.
    """
    whole = {"gen_length": plan.room, "steps": plan.steps, "block_length": plan.room, "refresh_interval": plan.interval}
    blocks = {**whole, "block_length": plan.block, "threshold": plan.threshold}
    cases = [
        Case(NO_CACHE, {**whole, "reuse": False}),
        Case("naive reuse of all layers", {**whole, "depth": plan.layers}),
        Case(WITHIN, {**whole, "depth": 0}),
        Case(BICACHE, {**whole, "depth": plan.depth}),
    ]
    for (alone, both), cache in zip(COMBINED.items(), ("prefix", "dual"), strict=True):
        cases.append(Case(alone, {**blocks, "reuse": False, "cache": cache}))
        cases.append(Case(both, {**blocks, "depth": plan.depth, "cache": cache}))
    return cases


def measured_cases(plan: Plan, bound: float, threshold: float, alone: bool = False) -> list[Case]:
    """The table's depth and interval, and what is measured or seen while serving in place of one, or of both.

    `bound`: nats of the divergence; `threshold`: of the drift; `alone`: leave out Fast-dLLM's caches, and no cache.
    """
    table = _alone(plan, plan.depth)
    whole = {name: value for name, value in table.items() if name not in ("depth", "refresh_interval")}
    fast = {"block_length": plan.block, "threshold": plan.threshold, "cache": "prefix"}
    measured, drift = {"depth_bound": bound}, {"refresh": "drift", "drift_threshold": threshold}
    every = {
        BY_TABLE: table,
        "depth and interval measured": {**whole, **measured},
        "refreshed on drift": {**whole, **drift, "depth": plan.depth},
        "depth measured, refreshed on drift": {**whole, **measured, **drift},
    }
    if not alone:
        without, both = next(iter(COMBINED.items()))
        every |= {both: {**table, **fast}, without: {**whole, **fast, "reuse": False}}
        every[NO_CACHE] = {**whole, "reuse": False}
    return [Case(name, fields, cold=True) for name, fields in every.items()]


def depth_cases(plan: Plan, depths: list[int]) -> list[Case]:
    """BiCache alone by depth."""
    return [Case(f"d = {depth}", _alone(plan, depth), depth) for depth in depths]


def threshold_cases(plan: Plan, depths: dict[float, int]) -> list[Case]:
    """BiCache alone by the threshold of the paper's rule, with the depth that it gives."""
    return [Case(f"tau = {threshold:g}", _alone(plan, depth), threshold) for threshold, depth in depths.items()]


def rule_cases(plan: Plan, depths: dict[str, tuple[int, float]], bound: float) -> list[Case]:
    """BiCache alone with the depth of each rule, whose divergence is known, and with what is measured while serving.

    `bound`: nats, of the latter.
    """
    cases = [Case(rule, _alone(plan, depth), nats, cold=True) for rule, (depth, nats) in depths.items()]
    measured = {**_alone(plan, 0), "depth_bound": bound}
    del measured["depth"]
    return [*cases, Case(f"depth measured while serving, at most {bound:g} nats", measured, cold=True)]


def _alone(plan: Plan, depth: int | None) -> dict[str, object]:
    return {
        "gen_length": plan.room,
        "steps": plan.steps,
        "block_length": plan.room,
        "refresh_interval": plan.interval,
        "depth": depth,
    }


def interval_cases(plan: Plan, intervals: list[int]) -> list[Case]:
    """BiCache alone by R."""
    return [Case(f"R = {n}", _alone(replace(plan, interval=n), plan.depth), n) for n in intervals]

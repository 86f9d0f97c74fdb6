"""What requests ask of ReasonCache, and what it reports."""

from typing import Final, Literal

import msgspec
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.params import Reuse
from runtime.report import Report

ReasoningMethod = Literal["reasoncache"]
METHOD: Final = "reasoncache"

PERCENTILE, TAU_MAX, TAU_MIN = 80.0, 0.9, 0.6


class ReasoningAsk(msgspec.Struct, tag=METHOD, tag_field="method"):
    """Sharing of reasoning steps; fields as in `ReasoningParams`."""

    percentile: float = PERCENTILE
    tau_max: float = TAU_MAX
    tau_min: float = TAU_MIN


class ReasoningReport(Report, tag=METHOD, kw_only=True):
    """How a request shares pages of reasoning steps.

    Attributes:
        approximate: whether a page was ever replaced.
        substituted_pages: number of pages that are replaced now; `amsr`: their share of the request's pages.
        first_substituted_token: index of the output token at which the first page ever replaced begins.
        exact_tokens: number of output tokens that were chosen before the first substitution.
        recomputed: number of admissions that recomputed substituted pages exactly.
    """

    method: ReasoningMethod = METHOD
    approximate: bool
    substituted_pages: int
    amsr: float
    first_substituted_token: int | None
    exact_tokens: int | None
    recomputed: int


class ReasoningParams(Reuse):
    """Sharing of the KV of reasoning steps that repeat within an output (ReasonCache)."""

    method: ReasoningMethod = METHOD
    percentile: float = Field(
        PERCENTILE, gt=0, le=100, description="a page is shared up to this percentile of the latest distances"
    )
    tau_max: float = Field(TAU_MAX, ge=0, le=1, description="similarity threshold of a step unlike all earlier steps")
    tau_min: float = Field(TAU_MIN, ge=0, le=1, description="similarity threshold of a step equal to all earlier steps")

    def check(self) -> None:
        if self.tau_min > self.tau_max:
            raise InvalidRequest(f"tau_min is {self.tau_min}, more than tau_max, {self.tau_max}", param="reuse.tau_min")

    def ask(self) -> ReasoningAsk:
        return ReasoningAsk(self.percentile, self.tau_max, self.tau_min)

"""Options of `ramet profile`."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from loadgen.harness.options import NewFile
from loadgen.offline.document_methods import METHODS
from runtime.features.chunks.ask import DocumentMethod

_RATIOS = [5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 95, 99]
# For a fusion table: documents in a prompt, quoted tokens, and tokens in an answer.
DOCUMENTS, QUOTED, ANSWER = 4, 16, 12


class ProfileFiles(BaseModel):
    """The files that a profile reads and writes."""

    out: NewFile = Field(description="write the table to this file (JSON)")
    plot: NewFile | None = Field(None, description="write a heat map to this file (PNG)")
    prefix: Path | None = Field(None, description="text file with the shared prefix; default: made-up rules")
    prompts: Path | None = Field(None, description="text file with a prompt in each line; default: made-up questions")


class ProfileSettings(BaseModel):
    """The settings that all profiles have. A table records its settings."""

    model_config = ConfigDict(extra="forbid")

    ratios: list[int]
    seed: int = Field(0, description="seed for the choice of prompts")

    @field_validator("ratios", mode="before")
    @classmethod
    def _split(cls, value: list[object]) -> list[str]:
        return [ratio for item in value for ratio in str(item).split(",")]

    @field_validator("ratios")
    @classmethod
    def _check(cls, value: list[int]) -> list[int]:
        if not value or not all(1 <= ratio <= 99 for ratio in value):
            raise ValueError("ratios are percentages from 1 to 99")
        return sorted(set(value))


class DepthSettings(ProfileSettings):
    """Settings of a depth table (BiCache)."""

    ratios: list[int] = Field(_RATIOS, description="shares of a request that are shared, in percent")
    samples: int = Field(32, ge=1, le=100_000, description="requests at each ratio (the paper uses 500)")
    length: int = Field(512, ge=8, description="tokens in a request: prefix, prompt and masks")
    gen_length: int = Field(64, ge=1, description="masks in a request; at most half of the tokens not shared")
    threshold: float = Field(0.97, gt=0, le=1, description="least cosine similarity of a reused layer")
    per_token: bool = Field(False, description="use the mean of single tokens' similarities, not one for all tokens")
    rule: Literal["kl", "cosine"] = Field("kl", description="kl lowers the paper's depths, cosine keeps them")
    kl_bound: float = Field(0.05, gt=0, description="largest divergence of outputs with and without reuse, in nats")
    kl_samples: int = Field(8, ge=1, description="requests at each ratio whose divergence is measured")
    kl_steps: int = Field(2, ge=1, description="denoising steps at which divergence is measured")


class FusionSettings(ProfileSettings):
    """Settings of a fusion table; `ratios` are shares of the documents' rows that are computed again."""

    ratios: list[int] = [5, 15, 30, 50]
    samples: int = Field(24, ge=1, le=100_000)
    length: int = Field(1024, ge=DOCUMENTS * (QUOTED + ANSWER))


class AnswerSettings(ProfileSettings):
    """Settings of a table of right answers; `ratios` are shares of the documents' rows that are computed again."""

    answers: Path = Field(
        description="for a causal model: ask the questions of this file, a JSON object in each line with question, "
        "answers, and documents (or ctxs, as in Natural Questions), by full prefill and by all document methods"
    )
    ratios: list[int] = [20, 30]
    samples: int = Field(100, ge=1, le=100_000)
    methods: list[DocumentMethod] = Field(list(METHODS), min_length=1, description="with --answers: methods to measure")
    documents: int = Field(10, ge=1, le=512, description="with --answers: mix in other questions' documents up to this")
    output: int = Field(40, ge=1, le=4096, description="with --answers: tokens in an answer")

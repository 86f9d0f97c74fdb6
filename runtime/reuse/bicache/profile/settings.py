"""Settings of a profile."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from runtime.reuse.bicache.profile.samples import encoded_length

_RATIOS = [5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 95, 99]


class ProfileSettings(BaseModel):
    """Options of `ramet profile`, which the table records."""

    model_config = ConfigDict(extra="forbid")

    ratios: list[int] = Field(_RATIOS, description="shared percent of a request, separated by commas")
    kept: list[int] = Field(
        [], description="also measure beginnings of encodings: percent that is left of them, separated by commas"
    )
    samples: int = Field(32, ge=1, le=100_000, description="requests at each ratio (the paper takes 500)")
    length: int = Field(512, ge=8, description="tokens of a request: prefix, prompt and masks")
    gen_length: int = Field(64, ge=1, description="masks of a request, at most half of what is not shared")
    threshold: float = Field(0.97, gt=0, le=1, description="least cosine similarity of a layer that is reused")
    per_token: bool = Field(False, description="depths by the mean of the tokens' similarities, not that of all")
    rule: Literal["kl", "cosine"] = Field("kl", description="kl lowers the paper's depths, cosine keeps them")
    kl_bound: float = Field(0.05, gt=0, description="most divergence of the outputs with and without reuse, in nats")
    kl_samples: int = Field(8, ge=1, description="requests at each ratio whose divergence is measured")
    kl_steps: int = Field(2, ge=1, description="denoising steps at which it is")
    seed: int = Field(0, description="which prompts are drawn")

    @field_validator("ratios", "kept", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("ratios", "kept")
    @classmethod
    def _check(cls, value: list[int], info: ValidationInfo) -> list[int]:
        if not all(1 <= share <= 99 for share in value) or (info.field_name == "ratios" and not value):
            raise ValueError(f"{info.field_name} are percentages of 1 to 99")
        return sorted(set(value))

    @property
    def longest_encoding(self) -> int:
        """Tokens of the longest prefix that is encoded."""
        return encoded_length(self.length - 2, min(self.kept, default=100))

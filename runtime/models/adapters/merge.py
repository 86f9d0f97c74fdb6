"""Base checkpoint + low-rank adapter -> checkpoint."""

from __future__ import annotations

# `<empty_output>`: reserved in SmolLM2's vocabulary, and in no text.
MASK_TOKEN_ID = 16
MASK_EMBEDDING = "mask_embedding"

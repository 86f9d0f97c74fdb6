"""Small models of three rotary embeddings, and what the papers' methods answer with them."""

from pathlib import Path

import pytest

from tests.runtime.features.chunks.reference import Reference
from tests.runtime.reuse.contract.subjects import load_fusion
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def rope_dirs(tmp_path_factory) -> dict[str, Path]:
    """Directories of models by their kind."""
    kinds = ("llama", "llama_llama3", "llama_yarn")
    return {kind: save_tiny(kind, tmp_path_factory.mktemp(kind)) for kind in kinds}


@pytest.fixture(scope="session")
def references(rope_dirs) -> dict[str, Reference]:
    return {kind: load_fusion(path) for kind, path in rope_dirs.items()}

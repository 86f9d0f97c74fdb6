"""Small models of three rotary embeddings, and what the papers' methods answer with them."""

from pathlib import Path

import pytest

from tests.runtime.reuse.fusion.reference import Reference
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def rope_dirs(tmp_path_factory, default_model_dir) -> dict[str, Path]:
    """Directories of models by their kind."""
    kinds = ("llama", "llama_llama3", "llama_yarn")
    return {kind: save_tiny(kind, tmp_path_factory.mktemp(kind), default_model_dir) for kind in kinds}


@pytest.fixture(scope="session")
def references(rope_dirs) -> dict[str, Reference]:
    return {kind: Reference(path) for kind, path in rope_dirs.items()}


@pytest.fixture
def reference(references) -> Reference:
    """Of the model of `tiny_dir`."""
    return references["llama"]

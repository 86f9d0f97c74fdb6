"""The default model's tokenizer."""

import pytest

from runtime.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(default_model_dir) -> Tokenizer:
    return Tokenizer.load(default_model_dir)

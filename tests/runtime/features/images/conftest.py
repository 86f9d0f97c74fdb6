"""A small random model that sees."""

import pytest

from tests.runtime.features.images.prompts import asked_of
from tests.runtime.features.images.seeing import Reference, save_seeing, sight_of


@pytest.fixture(scope="session")
def seeing_dir(default_model_dir, tmp_path_factory):
    return save_seeing(tmp_path_factory.mktemp("seeing") / "tiny-idefics3", default_model_dir)


@pytest.fixture(scope="session")
def seeing(seeing_dir):
    """transformers' reading of it."""
    return Reference(seeing_dir)


@pytest.fixture(scope="session")
def sight(seeing_dir):
    sight = sight_of(seeing_dir)
    assert sight is not None
    return sight


@pytest.fixture(scope="module")
def asked(seeing_dir, seeing):
    return asked_of(seeing_dir, seeing)


@pytest.fixture(scope="module")
def encoded(asked):
    return asked.prompts


@pytest.fixture(scope="module")
def expected(asked):
    return asked.expected

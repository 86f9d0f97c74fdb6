"""Small random diffusion models, one of each kind, and their plain readings."""

import pytest

from tests.runtime.features.diffusion.bicache.models import KINDS, save_tiny
from tests.runtime.features.diffusion.bicache.reference import PlainModel


@pytest.fixture(scope="session", params=KINDS)
def any_dir(request, tmp_path_factory):
    """A small random model of each kind."""
    return save_tiny(request.param, tmp_path_factory.mktemp("diffusion") / request.param)


@pytest.fixture(scope="session")
def any_plain(any_dir):
    return PlainModel(any_dir)


@pytest.fixture(scope="session")
def deep_dir(tmp_path_factory):
    """A LLaDA of six layers."""
    return save_tiny("llada", tmp_path_factory.mktemp("deep") / "llada", layers=6)

"""A small random model that sees."""

import pytest

from runtime.features.images.tower import Tower
from tests.runtime.features.images.prompts import asked_of
from tests.runtime.features.images.seeing import Reference, save_seeing, sight_of


@pytest.fixture(autouse=True)
def _towers_are_in_this_process(monkeypatch):
    """Each process of a tower would take seconds to import what it needs; `test_tower_process.py` has some."""
    monkeypatch.setattr("runtime.features.images.tower_process.open_tower", lambda *which: Tower(*which[:-1]))


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

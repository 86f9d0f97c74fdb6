"""The models that a start without `--model` names."""

import json
import os
from pathlib import Path

import pytest

from runtime.config import make_config
from server.commands import models


@pytest.fixture
def here(tmp_path, monkeypatch):
    hub = tmp_path / "hub"
    snapshot = hub / "models--org--large" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    with (snapshot / "model.safetensors").open("wb") as file:
        file.truncate(40 << 30)
    (hub / "models--org--empty" / "snapshots").mkdir(parents=True)
    own = tmp_path / "own"
    (own / "tiny").mkdir(parents=True)
    (own / "tiny" / "config.json").write_text(json.dumps({}))
    (own / "tiny" / "model.safetensors").write_bytes(b"x" * 1000)
    (own / "a.gguf").write_bytes(b"GGUF")
    (own / "notes").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(own)
    monkeypatch.setattr(models, "free_memory", lambda: 10 << 30)


def test_models_of_the_hub_and_of_this_directory_are_found(here):
    assert list(models.found_models()) == [("org/large", 40 << 30), ("./a.gguf", 4), ("./tiny", 1000)]


def test_a_neighbour_s_files_are_left_out(here, monkeypatch):
    (Path() / "gone.gguf").symlink_to("nowhere")
    (Path() / "loop.gguf").symlink_to("loop.gguf")
    (Path() / "directory.gguf").mkdir()
    (Path() / "notes" / "config.json").symlink_to("nowhere")
    (Path() / "private").mkdir()
    list_all = os.listdir

    def listdir(path):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return list_all(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert [name for name, _ in models.found_models()] == ["org/large", "./a.gguf", "./tiny"]


def test_a_directory_that_is_gone_has_no_models(here, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert [name for name, _ in models.found_models()] == ["org/large"]


def test_the_advice_says_what_fits(here):
    told = models.advice(make_config(pool_memory=2))
    assert "org/large (40.0 GiB, which is too large for this memory)" in told
    assert "./tiny (0.0 GiB);" in told
    assert told.endswith("weights of up to 7.3 GiB fit this machine's free memory")

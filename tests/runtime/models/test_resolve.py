"""From a name to a directory: GGUF files are converted once, and the hub gives no more than is needed."""

import json
import os
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from runtime.config import ModelConfig, make_config
from runtime.errors import ModelError
from runtime.models import gguf
from runtime.models.resolve import model_name, resolve_model, served_names, serves_any_name


def test_a_gguf_file_is_converted_once_for_each_state(tmp_path, monkeypatch):
    calls = []

    def convert(path, work, linked):
        calls.append(path)
        (work / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    path = tmp_path / "some.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "cache"))
    config = ModelConfig(model=str(path))
    first = resolve_model(config)
    assert resolve_model(config) == first
    assert len(calls) == 1
    assert model_name(config, first) == "some.Q8_0"
    os.utime(path, ns=(1, 1))
    assert resolve_model(config) != first
    assert len(calls) == 2
    assert len(list((tmp_path / "cache/models").iterdir())) == 2


@pytest.mark.parametrize("name", ["sha256-0f3a", "model.GGUF", "m-00001-of-00002.gguf"])
def test_a_files_content_says_that_it_is_gguf(tmp_path, monkeypatch, name):
    """Blobs of other programs have no suffix. A change of any part is a change of the model."""
    monkeypatch.setattr(gguf, "convert_gguf", lambda path, work, linked: (work / "config.json").write_text("{}"))
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "cache"))
    path, second = tmp_path / name, tmp_path / "m-00002-of-00002.gguf"
    path.write_bytes(b"GGUF")
    second.write_bytes(b"GGUF")
    config = ModelConfig(model=str(path))
    first = resolve_model(config)
    assert model_name(config, first) == {"model.GGUF": "model", "m-00001-of-00002.gguf": "m"}.get(name, name)
    os.utime(second, ns=(1, 1))
    assert (resolve_model(config) == first) == (not name.startswith("m-"))
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match="is a file, but not GGUF; a model directory or a GGUF file is needed"):
        resolve_model(config)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose one repository has this configuration; what is asked of it is recorded."""
    asked = {}
    snapshot = tmp_path / "snapshots/0123"
    snapshot.mkdir(parents=True)

    def install(config):
        (snapshot / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(snapshot / "config.json"))
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda *_, **given: asked.update(given) or str(snapshot)
        )
        return asked

    install.config = ModelConfig(model="some/model")
    return install


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub):
    asked = hub({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True})
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        resolve_model(hub.config)
    assert not asked


def test_neither_pickles_nor_code_nor_copies_are_fetched(hub, tiny_dir):
    asked = hub(json.loads((tiny_dir / "config.json").read_text()))
    resolve_model(hub.config)

    def fetched(name):
        allowed = any(fnmatch(name, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch(name, pattern) for pattern in asked["ignore_patterns"])

    wanted = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "tokenizer.model",
    ]
    assert all(fetched(name) for name in wanted)
    others = [
        "pytorch_model.bin",
        "modeling_x.py",
        "consolidated.safetensors",
        "onnx/config.json",
        "model.gguf",
        "a.pkl",
    ]
    assert not any(fetched(name) for name in others)


def test_a_directory_of_the_users_is_not_written(tiny_dir, tmp_path):
    before = {path.name: path.stat().st_mtime_ns for path in tiny_dir.iterdir()}
    assert resolve_model(ModelConfig(model=str(tiny_dir))) == tiny_dir
    assert {path.name: path.stat().st_mtime_ns for path in tiny_dir.iterdir()} == before
    assert not (tmp_path / "cache").exists()


def test_an_error_of_the_hubs_http_client_is_one_line(monkeypatch):
    def fail(*_):
        raise huggingface_hub.errors.HTTPError("the connection was cut")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelError, match=r"it could not be fetched from the hub: the connection was cut$"):
        resolve_model(ModelConfig(model="some/model"))


def test_a_star_among_the_served_names_allows_any_other():
    config = make_config(model="org/name", served_model_name="one, *").model
    assert (served_names(config), serves_any_name(config)) == (["one"], True)
    assert not serves_any_name(make_config(model="org/name", served_model_name="one").model)
    assert model_name(make_config(model="org/name", served_model_name="*").model, Path("there")) == "org/name"

"""From a name to a directory: GGUF files are converted once, and the hub gives no more than is needed."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch

import huggingface_hub
import huggingface_hub.errors
import pytest

from runtime.config import ModelConfig
from runtime.errors import ModelError
from runtime.models import gguf
from runtime.models.resolve import model_name, resolve_model


def test_a_gguf_file_is_converted_once_for_each_state(tmp_path, monkeypatch):
    calls = []

    def convert(path, target):
        calls.append(path)
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")
        return target

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    path = tmp_path / "some.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    config = ModelConfig(model=str(path), cache_dir=tmp_path / "cache")
    first = resolve_model(config)
    assert resolve_model(config) == first
    assert len(calls) == 1
    assert model_name(config, first) == "some.Q8_0"
    os.utime(path, ns=(1, 1))
    assert resolve_model(config) != first
    assert len(calls) == 2


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose one repository has this configuration; what is asked of it is recorded."""
    asked = {}

    def install(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(tmp_path / "config.json"))
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda *_, **given: asked.update(given) or str(tmp_path)
        )
        return asked

    return install


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub):
    asked = hub({"architectures": ["FalconForCausalLM"]})
    with pytest.raises(ModelError, match="FalconForCausalLM"):
        resolve_model(ModelConfig(model="some/model"))
    assert not asked


def test_neither_pickles_nor_code_nor_copies_are_fetched(hub, tiny_dir):
    asked = hub(json.loads((tiny_dir / "config.json").read_text()))
    resolve_model(ModelConfig(model="some/model"))

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


def test_an_error_of_the_hubs_http_client_is_one_line(monkeypatch):
    def fail(*_):
        raise huggingface_hub.errors.HTTPError("the connection was cut")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelError, match=r"it could not be fetched from the hub: the connection was cut$"):
        resolve_model(ModelConfig(model="some/model"))

"""PEFT's files: what is read of them, and what is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from runtime.errors import ModelError
from runtime.models.adapters.lora import read_lora
from tests.lora import save_lora

A, B = "base_model.model.0.lora_A.weight", "base_model.model.0.lora_B.weight"


@pytest.fixture
def adapter(tmp_path):
    return save_lora(tmp_path / "adapter", nn.Sequential(nn.Linear(6, 10)), seed=1, targets=("0",))


def change(adapter, **fields):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_scale_is_within_b(adapter):
    tensors = load_file(adapter / "adapter_model.safetensors")
    wanted = tensors[B] @ tensors[A]
    change(adapter, use_rslora=False)
    found = read_lora(adapter)
    assert (found.rank, list(found.factors)) == (4, ["0"])
    torch.testing.assert_close(found.factors["0"].b @ found.factors["0"].a, 2 * wanted)
    change(adapter, use_rslora=True)
    scaled = read_lora(adapter)
    torch.testing.assert_close(scaled.factors["0"].b @ scaled.factors["0"].a, 4 * wanted)
    assert scaled.digest != found.digest, "equal weights under another configuration are another adapter"


def test_the_digest_is_of_the_content(adapter, tmp_path):
    first = read_lora(adapter).digest
    adapter.rename(tmp_path / "elsewhere")
    assert read_lora(tmp_path / "elsewhere").digest == first
    assert read_lora(save_lora(adapter, nn.Sequential(nn.Linear(6, 10)), 2, targets=("0",))).digest != first


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"0": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"r": 5}, "r = 5"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"r": 10**400}, "r is 1000"),
        ({"r": 10**400, "use_rslora": True}, "r is 1000"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000"),
        ({"lora_alpha": -(10**400)}, "lora_alpha -1000"),
    ],
)
def test_what_is_more_than_low_rank_products_is_refused(adapter, fields, named):
    change(adapter, **fields)
    with pytest.raises(ModelError, match=named):
        read_lora(adapter)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "changes no layer"),
        ({A: torch.ones(4, 6)}, r"0\.lora_B\.weight is missing"),
        ({B: torch.ones(10, 4)}, "neither the A nor the B"),
        ({"base_model.model.0.lora_magnitude_vector": torch.ones(10)}, "lora_magnitude_vector is neither"),
        ({"0.lora_A.weight": torch.ones(4, 6), "0.lora_B.weight": torch.ones(10, 4)}, "does not begin with"),
        ({A: torch.ones(4, 6), B: torch.ones(4)}, r"\[4, 6\] and \[4\]"),
        ({A: torch.full((4, 6), torch.inf), B: torch.ones(10, 4)}, "not finite"),
        ({A: torch.ones(4, 6), B: torch.full((10, 4), 3e38)}, "not finite"),
    ],
)
def test_other_tensors_are_refused(adapter, tensors, named):
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=named):
        read_lora(adapter)


def test_damaged_and_missing_files_and_pickles(adapter, tmp_path):
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        read_lora(adapter)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        read_lora(adapter)
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="a pickle, which Ramet never loads"):
        read_lora(adapter)
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        read_lora(tmp_path / "nowhere")
    (save_lora(adapter, nn.Sequential(nn.Linear(6, 10)), 1, targets=("0",)) / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read_lora(adapter)


def test_deeply_nested_json_is_refused(adapter):
    (adapter / "adapter_config.json").write_text('{"r": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read: maximum recursion depth"):
        read_lora(adapter)


def test_files_that_are_replaced_while_they_are_read(adapter, monkeypatch):
    """What is computed is what the digest stands for; one that is gone by then is an error."""
    original, real = read_lora(adapter), Path.read_bytes

    def replaced(path):
        data = real(path)
        path.write_bytes(b"{}")
        return data

    monkeypatch.setattr(Path, "read_bytes", replaced)
    found = read_lora(adapter)
    assert (found.digest, found.rank) == (original.digest, original.rank)

    def gone(path):
        path.unlink()
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(ModelError, match="cannot be read"):
        read_lora(adapter)

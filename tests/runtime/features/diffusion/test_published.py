"""What configurations of diffusion models say of masks, blocks and samplers."""

import json

import pytest
from transformers import DiffusionGemmaGenerationConfig

from runtime.errors import ModelError
from runtime.features.diffusion.published import DiffusionSpec, canvas_spec, diffusion_spec, read_spec
from tests.runtime.features.diffusion.bicache.models import MASK, save_tiny


@pytest.mark.parametrize(("kind", "shift"), [("llada", 0), ("dream", 1), ("llama_diffusion", 1)])
def test_what_the_configuration_says(kind, shift, tmp_path):
    algorithm = "entropy" if kind == "dream" else "low_confidence"
    assert read_spec(save_tiny(kind, tmp_path / kind)) == DiffusionSpec(MASK, shift, algorithm)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llada", {"mask_token_id": 300}),
        ("dream", {"mask_token_id": None}),
        ("llama_diffusion", {"logits_shift": 2}),
        ("llama_diffusion", {"vocab_size": None}),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, kind, changes):
    path = save_tiny(kind, tmp_path / kind)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match="wrong kind" if "vocab_size" in changes else next(iter(changes))):
        read_spec(path)


@pytest.mark.parametrize(("size", "block"), [(None, 8), (16, 8), (20, 20), (4, 4)])
def test_a_block_fits_into_the_attention_of_the_configuration(size, block):
    spec = diffusion_spec({"vocab_size": 200_000, "bd_size": size}, "Fast_dLLM_QwenForCausalLM")
    assert (spec.attended, spec.block) == (size or 32, block)


def test_diffusion_gemmas_defaults_are_those_of_transformers():
    theirs = DiffusionGemmaGenerationConfig._get_default_generation_params()
    names = {"steps": "max_denoising_steps"}
    spec = canvas_spec({}, {})
    assert (spec.block, spec.algorithm) == (256, "entropy_bound")
    assert spec.defaults.pop("entropy_bound") == theirs["sampler_config"].entropy_bound
    assert spec.defaults == {name: theirs[names.get(name, name)] for name in spec.defaults}

"""Models that see as their published files describe them, which leave fields out."""

import json

import pytest
from transformers import LlavaOnevisionConfig

from runtime.errors import ModelError
from runtime.features.images.client import ModelSight
from runtime.features.images.families.gemma3 import WholeRules
from runtime.features.images.rules import load_rules
from runtime.models.spec import DecoderSpec
from tests.runtime.features.images.seeing import save_seeing

GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14, "vision_use_head": False},
}
GEMMA3_IMAGES = {"size": {"height": 896, "width": 896}, "do_pan_and_scan": None, "do_convert_rgb": None}
QWEN2_5_VL_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "patch_size": 14, "spatial_merge_size": 2},
    "vocab_size": 151936,
}


def write(directory, config, images=None, **more):
    (directory / "config.json").write_text(json.dumps({**config, **more}))
    if images is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(images))
    return directory


def test_gemma3(tmp_path):
    spec = DecoderSpec.load(write(tmp_path, GEMMA3_4B, GEMMA3_IMAGES))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert (spec.context_length, spec.eos_token_ids, spec.tie_embeddings) == (131072, (1, 106), True)
    assert spec.windows[:6] == (1024,) * 5 + (None,)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.axes) == ("linear", 8.0, ())
    rules = load_rules(tmp_path)
    assert (rules.resample, rules.mean) == (2, (0.5, 0.5, 0.5))
    assert rules.sizes(30, 40) == [(896, 896)]
    assert rules.rows(896, 896) == 256


@pytest.mark.parametrize(
    ("more", "images", "reason"),
    [
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"mm_tokens_per_image": 1024}, {}, "1024 rows"),
        ({"mm_tokens_per_image": 250}, {}, "250 rows"),
        ({}, {"size": {"height": 896, "width": 448}}, "256 rows"),
    ],
)
def test_gemma3_as_it_is_not_served(tmp_path, more, images, reason):
    with pytest.raises(ModelError, match=reason):
        load_rules(write(tmp_path, GEMMA3_4B, {**GEMMA3_IMAGES, **images}, **more))


def test_qwen2_5_vl(tmp_path):
    """The fields of its decoder are beside those of its tower."""
    spec = DecoderSpec.load(write(tmp_path, QWEN2_5_VL_3B, {"min_pixels": 3136, "max_pixels": 12845056}))
    assert (spec.qkv_bias, spec.tie_embeddings, spec.windows, spec.head_dim) == (True, True, (), 128)
    assert (spec.rope.kind, spec.rope.axes) == ("default", (0,) * 16 + (1,) * 24 + (2,) * 24)
    assert spec.stored_name("model.norm.weight") == "model.norm.weight"
    rules = load_rules(tmp_path)
    assert (rules.row, rules.least, rules.most, rules.sizes(1000, 700)) == (28, 3136, 12845056, [(1008, 700)])


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}, "with the sum 64"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "a sliding window"),
    ],
)
def test_qwen2_5_vl_as_it_is_not_served(tmp_path, more, reason):
    with pytest.raises(ModelError, match=reason):
        DecoderSpec.load(write(tmp_path, QWEN2_5_VL_3B, **more))


def test_qwen3_vl(tmp_path):
    text = {
        "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 262144, "head_dim": 128,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 100,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
    }  # fmt: skip
    vision = {"deepstack_visual_indexes": [5, 11, 17], "patch_size": 16, "spatial_merge_size": 2}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text, "vision_config": vision}
    images = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "image_mean": [0.5] * 3}
    spec = DecoderSpec.load(write(tmp_path, config, images))
    assert (spec.qk_norm, spec.rope.theta, spec.rope.axes) == (True, 5e6, (0, 1, 2) * 20 + (0,) * 4)
    rules = load_rules(tmp_path)
    assert (rules.added, rules.row, rules.sizes(1000, 700)) == (3, 32, [(992, 704)])


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"vision_feature_select_strategy": "default"}, "'default'"),
        ({"vision_aspect_ratio": "square"}, "cannot be read"),
    ],
)
def test_llava_onevision_as_it_is_not_served(tmp_path, more, reason):
    images = {"size": {"height": 384, "width": 384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    config = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "image_grid_pinpoints": [[384, 384]]}
    with pytest.raises(ModelError, match=reason):
        load_rules(write(tmp_path, {**config, "vision_config": {"patch_size": 14}}, images, **more))


def test_llava_onevision(tmp_path):
    """What its files leave out is what transformers' classes have; its embedding is tied in the text alone."""
    text = {
        "hidden_size": 896, "intermediate_size": 4864, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {"hidden_size": 1152, "image_size": 384, "model_type": "siglip_vision_model", "patch_size": 14}
    grids = [[384, 384 * i] for i in range(1, 7)]
    config = {"text_config": text, "vision_config": vision, "image_grid_pinpoints": grids, "tie_word_embeddings": False}
    plain = LlavaOnevisionConfig(**config)
    config["architectures"] = ["LlavaOnevisionForConditionalGeneration"]
    spec = DecoderSpec.load(write(tmp_path, config, {"size": {"height": 384, "width": 384}}))
    wanted = plain.text_config
    assert (spec.vocab_size, spec.context_length) == (wanted.vocab_size, wanted.max_position_embeddings)
    assert (spec.tie_embeddings, spec.rms_norm_eps) == (plain.tie_word_embeddings, wanted.rms_norm_eps) == (True, 1e-6)
    rules = load_rules(tmp_path)
    assert (rules.most, rules.row, len(rules.grids)) == (9, 14, 6)


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "llava_onevision", "mistral3", "qwen2_5_vl"])
def test_what_an_image_processor_leaves_out(tmp_path, default_model_dir, kind):
    """It has what transformers' class of the family has."""
    path = save_seeing(tmp_path / kind, default_model_dir, kind)
    whole = load_rules(path)
    file = path / "preprocessor_config.json"
    fields = json.loads(file.read_text())
    for name in ("resample", "rescale_factor", "image_mean", "image_std"):
        assert fields.pop(name) is not None, "the file has all of them"
    file.write_text(json.dumps(fields))
    assert load_rules(path) == whole


def test_axes_of_qwen3_5_take_turns(tmp_path):
    text = {
        "hidden_size": 1024, "intermediate_size": 3584, "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
        "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 1000,
        "rope_parameters": {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7},
    }  # fmt: skip
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    spec = DecoderSpec.load(write(tmp_path, config))
    assert spec.rope.axes == (0, 1, 2) * 10 + (0, 1)
    assert spec.stored_name("model.norm.weight") == "model.language_model.norm.weight"
    assert load_rules(tmp_path) is None, "without an image processor, it is served for text alone"


def test_the_text_that_a_template_writes_for_an_image(sight):
    """Gemma's templates write the token before the rows of an image, and users of plain texts do, too."""
    rules = WholeRules(32, 2, 1 / 255, (0.5,) * 3, (0.5,) * 3, "<image>", 8)
    found = ModelSight(rules, sight.tokenizer).pictures("", "messages")
    mark = found.at_tokens("a<start_of_image>b", ["data:image/png;base64,AAAA"])[1:-1]
    turns = [{"role": "user", "content": f"a{mark}b <image>"}]

    def template(messages):
        parts = messages[0]["content"]
        return "".join(part.get("text", "<start_of_image>") for part in parts) + "<image>"

    assert found.write(template, turns) == f"a{mark}b <image><image>"

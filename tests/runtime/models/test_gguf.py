"""GGUF: converted models equal their originals in transformers, and their tokenizers those of the library."""

import json
import shutil
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runtime.errors import ModelError
from runtime.models.gguf import _ends, convert_gguf
from runtime.models.publishing import provide
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.runtime.execution.transformers.architectures import save_small
from tests.runtime.models.test_gguf_files import convert
from tests.tiny import save_tiny


def permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows."""
    rows = len(tensor)
    return tensor.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(source, path, architecture, **metadata):
    """A GGUF file of a Hugging Face directory."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]
    # The bytes and the first merges: the embedding may have more rows, and all of them take seconds.
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)[:300]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 17 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in vocabulary["merges"][:20]])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if "sliding_window" in config and architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    # Qwen3's names include those of the other architectures of Ramet's own code.
    kind = gguf.MODEL_ARCH.GEMMA3 if architecture == "gemma3" else gguf.MODEL_ARCH.QWEN3
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        data = tensor.float().numpy()
        module, kind = name.rsplit(".", 1)
        target = f"{names[module]}.{kind}"
        if architecture == "llama" and module.endswith(".q_proj"):
            data = permute(data, heads)
        if architecture == "llama" and module.endswith(".k_proj"):
            data = permute(data, kv_heads)
        if architecture == "gemma3" and module.endswith("norm"):
            data = data + 1
        writer.add_tensor(target, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def sources(tmp_path, default_model_dir):
    def make(kind):
        return save_tiny(kind, tmp_path / kind, default_model_dir)

    return make


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.arange(1000, 1030)[None]).logits


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("llama", "llama"), ("llama_tied_biases", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_converted_model_is_its_original(sources, tmp_path, kind, architecture):
    source = sources(kind)
    target = convert(write_gguf(source, tmp_path / "m.gguf", architecture), tmp_path / "converted")
    assert torch.equal(logits(target), logits(source))


def test_gemma_is_its_original(tmp_path, default_model_dir):
    windows = ["sliding_attention"] * 3  # of six layers, the last one has none
    source = save_small("Gemma3", tmp_path / "gemma3", vocab_size=300, layer_types=windows)
    shutil.copy(default_model_dir / "tokenizer.json", source)
    target = convert(write_gguf(source, tmp_path / "m.gguf", "gemma3"), tmp_path / "converted")
    model, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, target))
    with torch.inference_mode():
        torch.testing.assert_close(*(one(torch.arange(30)[None]).logits for one in (model, other)))
    assert other.config.sliding_window == 9
    linked = provide(tmp_path / "linked", partial(convert_gguf, tmp_path / "m.gguf", linked=True))
    first, second = (load_weights(path, DecoderSpec.load(path), torch.float32) for path in (source, linked))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    path = write_gguf(source, tmp_path / "n.gguf", "gemma3", gemma3__rope__scaling__type="linear")
    with pytest.raises(ModelError, match=r"gemma3\.rope\.scaling\.type"):
        convert(path, tmp_path / "d")


def test_linear_scaling_survives(sources, tmp_path):
    source = sources("llama_linear")
    path = write_gguf(source, tmp_path / "m.gguf", "llama", llama__rope__scaling__type="linear")
    assert json.loads((convert(path, tmp_path / "c") / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 1.0,
    }
    path = write_gguf(source, tmp_path / "n.gguf", "llama", llama__rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="longrope"):
        convert(path, tmp_path / "d")


def test_llama3_factors_become_a_config(tmp_path):
    from runtime.models.gguf import _llama3_scaling
    from runtime.models.rope import RotaryEmbedding
    from runtime.models.rope_spec import RopeSpec

    cpu = torch.device("cpu")
    plain = RotaryEmbedding(RopeSpec(500000.0), 64, cpu).inv_freq
    spec = RopeSpec(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    factors = (plain / RotaryEmbedding(spec, 64, cpu).inv_freq).numpy()
    scaling = _llama3_scaling(tmp_path / "m.gguf", factors, {"rope_theta": 500000.0})
    assert scaling["factor"] == pytest.approx(8.0)
    with pytest.raises(ModelError, match="rope_freqs"):
        _llama3_scaling(tmp_path / "m.gguf", np.linspace(1, 3, 32), {"rope_theta": 500000.0})


def test_sentencepiece_tokenizers_equal_the_library(tmp_path):
    """A real SentencePiece BPE model, trained here, against what is rebuilt from its pieces and scores."""
    import sentencepiece

    from runtime.models.gguf_tokenizer import build_tokenizer

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(STORIES * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    pieces = range(theirs.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in pieces],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in pieces],
        "tokenizer.ggml.token_type": [3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in pieces],
        "tokenizer.ggml.unknown_token_id": theirs.unk_id(),
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
    }
    fast, _ = build_tokenizer(tmp_path / "m.gguf", metadata)
    for text in [*STORIES, "unseen words: zebra, quux", "日本 🌱", "  two  spaces "]:
        ids = fast.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text)
        assert fast.encode(text).ids == [theirs.bos_id(), *ids]
        assert fast.decode(ids) == text


STORIES = [
    "The aspen grove on the north slope looks like a forest, but below the ground it is a single tree.",
    "Every stem that the walker passes grew from the same root, and each of them carries the same wood.",
    "When one stem falls, the root sends up another, and the forest does not notice.",
]


@pytest.mark.parametrize(
    ("ids", "ends"),
    [({}, None), ({"eos": 2}, 2), ({"eos": 2, "eot": 2}, 2), ({"eos": 2, "eot": 7, "eom": 0}, [2, 7, 0])],
)
def test_ends_of_text_turn_and_message(ids, ends):
    assert _ends({f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}) == ends


def test_a_rounded_model_has_the_nearest_bfloat16_values(sources, tmp_path):
    file = write_gguf(sources("llama"), tmp_path / "m.gguf", "llama")
    exact = load_file(convert(file, tmp_path / "exact") / "model.safetensors")
    rounded = load_file(provide(tmp_path / "rounded", partial(convert_gguf, file, rounded=True)) / "model.safetensors")
    for name, tensor in exact.items():
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16)), name

"""GGUF files: number formats, missing and odd tensors, files that are cut."""

import json
import struct
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import ModelError
from runtime.models.gguf import _ends, convert_gguf
from runtime.models.gguf_tokenizer import build_tokenizer
from runtime.models.publishing import provide
from runtime.models.spec import DecoderSpec
from runtime.models.tokenizer import Tokenizer
from runtime.models.weights import load_weights
from tests.full_disk import little_room

HIDDEN, LAYERS, HEADS, TOKENS = 64, 2, 4, 260
Kind = gguf.GGMLQuantizationType


def tensors(seed=0):
    random = np.random.default_rng(seed)

    def make(*shape):
        return random.standard_normal(shape, dtype=np.float32)

    found = {"token_embd.weight": make(TOKENS, HIDDEN), "output_norm.weight": make(HIDDEN)}
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{i}.{name}.weight"] = make(HIDDEN)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            found[f"blk.{i}.{name}.weight"] = make(HIDDEN, HIDDEN)
    return found


def write(path, values=None, kind=None, endianess=gguf.GGUFEndian.LITTLE, **fields):
    """A small llama file; matrices are stored as `kind`, or as a dict says by the last part of their names."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    counts = {"block_count": LAYERS, "context_length": 99, "embedding_length": HIDDEN, "feed_forward_length": HIDDEN}
    counts |= {"attention.head_count": HEADS, "attention.head_count_kv": HEADS}
    for name, value in counts.items():
        writer.add_uint32(f"llama.{name}", fields.pop(name, value))
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(TOKENS)])
    for name, value in (values or tensors()).items():
        own = kind.get(name.split(".")[-2]) if isinstance(kind, dict) else kind
        if own is None or value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_parts(path, count, **fields):
    """A file's model in several files, as llama.cpp splits it; returns their paths."""
    values = tensors()
    names, paths = list(values), []
    for i in range(count):
        paths.append(path.with_name(f"{path.stem}-{i + 1:05}-of-{count:05}{path.suffix}"))
        some = {name: values[name] for name in names[i::count]}
        given = {"split.no": i, "split.count": count} | fields
        write(paths[-1], some, kind=Kind.Q8_0, **given)
    return paths


def convert(path, target):
    return provide(target, partial(convert_gguf, path))


@pytest.mark.parametrize(
    ("kind", "stored"), [(None, "F32"), (Kind.F16, "F16"), (Kind.BF16, "BF16"), (Kind.Q8_0, "F32"), (Kind.Q4_1, "F32")]
)
def test_number_formats_keep_every_bit(tmp_path, kind, stored):
    out = convert(write(tmp_path / "m.gguf", kind=kind), tmp_path / "out")
    name, value = "model.layers.1.mlp.up_proj.weight", tensors()["blk.1.ffn_up.weight"]
    wanted = value if kind is None else gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored]
    assert load_file(out / "model.safetensors")[name].dtype == dtype
    loaded = load_weights(out, DecoderSpec.load(out), torch.float32)
    np.testing.assert_array_equal(loaded[name].numpy(), wanted.reshape(value.shape))
    np.testing.assert_array_equal(loaded["model.norm.weight"].numpy(), tensors()["output_norm.weight"])


def without(name):
    return {k: v for k, v in tensors().items() if k != name}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"values": without("blk.1.attn_v.weight")}, "no tensor for model.layers.1.self_attn.v_proj.weight"),
        ({"feed_forward_length": 32}, "ffn_gate.weight has shape"),
        ({"block_count": 1}, "blk.1.attn_norm.weight, which this model does not use"),
        ({"values": {**tensors(), "blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)}}, "ffn_gate_inp"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"endianess": gguf.GGUFEndian.BIG}, "big-endian"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.head_count": 0}, "m.gguf has metadata of the wrong kind"),
        ({"tokenizer.ggml.scores": 1, "tokenizer.ggml.token_type": 1}, "m.gguf has metadata of the wrong kind"),
        ({"split.count": "three"}, "one of three parts"),
        ({"general.architecture": 3}, "architecture 3; supported"),
        ({"general.architecture": "clip"}, "m.gguf is a projector (mmproj) and no model"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path, options, words):
    path = write(tmp_path / "m.gguf", **options)
    with pytest.raises(ModelError) as error:
        convert(path, tmp_path / "out")
    assert words in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"], "nothing half-written stays"


def test_an_unknown_number_format(tmp_path):
    path = write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # after the name: number of dimensions, the one dimension, the type
    content[at : at + 4] = (250).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError, match="250"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.2, 0.9, 0.999])
def test_a_file_cut_anywhere(tmp_path, share):
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("room", [5_000, 60_000])
def test_a_disk_that_is_full(tmp_path, room):
    """For the tokenizer, and for the tensors."""
    path = write(tmp_path / "m.gguf")
    with little_room(room), pytest.raises(ModelError, match=r"^cannot write .*/out: File too large"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_model_in_parts_is_the_whole_one(tmp_path, given):
    """Whichever part is named; the parts are also found when the tensors stay in them."""
    whole = load_file(convert(write(tmp_path / "m.gguf", kind=Kind.Q8_0), tmp_path / "whole") / "model.safetensors")
    part = in_parts(tmp_path / "m.gguf", 3)[given]
    parts = load_file(convert(part, tmp_path / "parts") / "model.safetensors")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    linked = provide(tmp_path / "linked", partial(convert_gguf, part, linked=True))
    loaded = load_weights(linked, DecoderSpec.load(linked), torch.float32)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.items())


def test_parts_behind_symbolic_links_are_found(tmp_path):
    """The hub's cache links to files whose names say nothing."""
    links = in_parts(tmp_path / "m.gguf", 2)
    for i, link in enumerate(links):
        link.symlink_to(link.rename(tmp_path / f"blob{i}"))
    linked = provide(tmp_path / "linked", partial(convert_gguf, links[0], linked=True))
    assert len(load_weights(linked, DecoderSpec.load(linked), torch.float32)) == len(tensors())


def test_parts_that_are_missing_or_renamed(tmp_path):
    first, second = in_parts(tmp_path / "m.gguf", 2)
    second.unlink()
    with pytest.raises(ModelError, match=r"one of 2 parts, and m-00002-of-00002\.gguf is missing beside it"):
        convert(first, tmp_path / "out")
    with pytest.raises(ModelError, match=r"renamed\.gguf is one of 2 parts; the names of parts must end"):
        convert(first.rename(tmp_path / "renamed.gguf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("tokens", "chat"),
    [(["<|im_start|>", "<|im_end|>"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
     (["<|im_start|>"], "User: Hi\n\nAssistant:")],
)  # fmt: skip
def test_a_file_without_a_chat_template_gets_a_plain_one(tmp_path, caplog, tokens, chat):
    words = {"model": "gpt2", "pre": "gpt-2", "tokens": [*tokens, "a"], "token_type": [1] * 3}
    fast, settings = build_tokenizer(tmp_path / "m.gguf", {f"tokenizer.ggml.{k}": v for k, v in words.items()})
    (tmp_path / "tokenizer.json").write_text(fast.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == chat
    assert "this model has no chat template, so chats get a plain one" in caplog.text
    caplog.clear()
    (tmp_path / "own.jinja").write_text("mine")
    assert Tokenizer.load(tmp_path, tmp_path / "own.jinja").apply_chat_template([]) == "mine"
    assert "plain" not in caplog.text


@pytest.mark.parametrize("wrong", ["scores", "token_type"])
def test_scores_and_types_are_one_for_each_token(tmp_path, wrong):
    words = {"model": "llama", "tokens": ["<unk>", "a", "b"], "scores": [0, -1, -2], "token_type": [2, 1, 1]}
    words[wrong] = words[wrong][:2]
    with pytest.raises(ModelError, match=r"m\.gguf: the tokenizer has 3 tokens.* one of each"):
        build_tokenizer(tmp_path / "m.gguf", {f"tokenizer.ggml.{k}": v for k, v in words.items()})


def test_ends_and_windows_come_from_the_file(tmp_path):
    fields = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    with_window = fields | {"llama.attention.sliding_window": 50}
    out = convert(write(tmp_path / "m.gguf", **with_window), tmp_path / "out")
    spec = DecoderSpec.load(out)
    assert (spec.eos_token_ids, spec.context_length, set(spec.windows)) == ((2, 7), 99, {50})
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    texts = ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"]
    assert _ends({"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.tokens": texts}) == [0, 1, 3]


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: bytes, kind: int, *values: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + b"".join(values)


def headed(*fields: bytes, tensors: tuple[bytes, ...] = ()) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join((*fields, *tensors))


def stored(*sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(b"t") + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset) + b"\0" * 64


BOMBS = {
    "numbers": headed(field(b"a", 9, struct.pack("<IQ", 4, 1 << 40))),
    "numbers that wrap": headed(field(b"a", 9, struct.pack("<IQ", 12, (1 << 64) - 1))),
    "texts": headed(field(b"a", 9, struct.pack("<IQ", 8, 3_000_000), b"\0" * 24_000_000)),
    "bytes": headed(field(b"a", 9, struct.pack("<IQ", 0, 3_000_000), b"\0" * 3_000_000)),
    "arrays": headed(field(b"a", 9, struct.pack("<IQ", 9, 1 << 40))),
    "a long text": headed(field(b"a", 8, struct.pack("<Q", 1 << 60))),
    "an unknown type": headed(field(b"a", 99)),
    "fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 50),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 50, 0),
    "dimensions": headed(tensors=(stored(*[1] * 9),)),
    "a large tensor": headed(tensors=(stored(1 << 62, 1 << 62),)),
    "an offset that wraps": headed(tensors=(stored(4, offset=(1 << 64) - 8),)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_header_promises_is_compared_with_the_file(tmp_path, name, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: pytest.fail("it would make an object for each value"))
    path = tmp_path / "m.gguf"
    path.write_bytes(BOMBS[name])
    with pytest.raises(ModelError, match=r"m\.gguf is truncated, or not a readable GGUF file"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    "counts",
    [
        {"block_count": (1 << 32) - 1},
        {"llama.nextn_predict_layers": (1 << 32) - 100_000},
        {"llama.nextn_predict_layers": LAYERS},
        {"llama.expert_count": (1 << 32) - 1},
        {"llama.expert_count": "many"},
    ],
)
def test_counts_of_layers_and_experts_are_compared_with_the_tensors(tmp_path, counts):
    path = write(tmp_path / "m.gguf", **counts)
    with pytest.raises(ModelError, match="its tensors allow"):
        convert(path, tmp_path / "out")

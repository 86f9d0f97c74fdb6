"""GGUF files that are computed as they are stored."""

import errno
import os
from functools import partial

import pytest
import torch

from runtime.errors import ModelError
from runtime.execution.native import stored
from runtime.models.gguf import convert_gguf
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.publishing import provide
from tests.runtime.engine.driver import make_core
from tests.runtime.execution.native.stored_models import check_near_unpacked, logits_with_an_adapter, make_native
from tests.runtime.execution.native.test_decoder import mixed_batch
from tests.runtime.models.test_gguf_files import TOKENS, Kind, tensors, write

# Queries and keys are one matrix, values another; gate and up differ, and are unpacked; so is what is in 16 bits.
MIXED = {
    **{"token_embd": Kind.Q8_0, "attn_q": Kind.Q4_0, "attn_k": Kind.Q4_0, "attn_v": Kind.Q5_1},
    **{"attn_output": Kind.F16, "ffn_gate": Kind.Q4_1, "ffn_up": Kind.Q5_0, "ffn_down": Kind.Q5_0, "output": Kind.BF16},
}


def make_file(path, kinds, tied):
    values = {name: value / 4 if value.ndim == 2 else value for name, value in tensors().items()}
    if not tied:
        values["output.weight"] = tensors(1)["token_embd.weight"] / 4
    return write(path, values, kinds)


def link(path, target):
    return provide(target, partial(convert_gguf, path, linked=True))


@pytest.mark.parametrize(("kinds", "tied"), [(Kind.Q4_1, True), (Kind.Q8_0, False), (MIXED, False), (MIXED, True)])
def test_logits_are_near_those_of_unpacked_weights(library, tmp_path, kinds, tied):
    directory = link(make_file(tmp_path / "m.gguf", kinds, tied), tmp_path / "out")
    check_near_unpacked(library, directory, directory, TOKENS, 0.1, 0.05)


def test_rows_with_an_adapter(library, tmp_path):
    directory = link(make_file(tmp_path / "m.gguf", MIXED, False), tmp_path / "out")
    plain, got, wanted = logits_with_an_adapter(library, directory, directory, TOKENS)
    assert (got - wanted).norm() / wanted.norm() < 0.1
    assert (plain - wanted).norm() / wanted.norm() > 0.3


def test_a_second_engine_maps_what_the_first_packed(library, tmp_path):
    directory = link(make_file(tmp_path / "m.gguf", Kind.Q4_0, True), tmp_path / "out")
    make_native(library, directory)
    [packed] = directory.glob("codes-*.bin")
    before = packed.stat()
    native, _ = make_native(library, directory)
    assert (packed.stat().st_ino, packed.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with open(f"/proc/{os.getpid()}/maps") as maps:
        assert str(packed) in maps.read()
    del native


def test_a_full_disk(library, tmp_path, monkeypatch):
    directory = link(make_file(tmp_path / "m.gguf", Kind.Q4_0, True), tmp_path / "out")
    batch = mixed_batch(2)
    batch.tokens %= TOKENS
    wanted = make_native(library, directory)[0].forward(batch).clone()
    [packed] = directory.glob("codes-*.bin")
    packed.unlink()

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert torch.equal(make_native(library, directory)[0].forward(batch), wanted)
    assert not list(directory.glob("codes-*.bin"))
    assert not list(directory.glob(".packing-*"))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: bytes(len(data))])
def test_a_damaged_packed_file_is_packed_again(library, tmp_path, damage):
    directory = link(make_file(tmp_path / "m.gguf", Kind.Q4_0, True), tmp_path / "out")
    batch = mixed_batch(2)
    batch.tokens %= TOKENS
    wanted = make_native(library, directory)[0].forward(batch).clone()
    [packed] = directory.glob("codes-*.bin")
    content = packed.read_bytes()
    packed.write_bytes(damage(content))
    assert torch.equal(make_native(library, directory)[0].forward(batch), wanted)
    assert packed.read_bytes() == content
    before = packed.stat().st_ino
    make_native(library, directory)
    assert packed.stat().st_ino == before


def test_engines_of_two_dtypes_share_no_packed_file(library, tmp_path):
    directory = link(make_file(tmp_path / "m.gguf", MIXED, False), tmp_path / "out")
    make_native(library, directory)
    [before] = directory.glob("codes-*.bin")
    make_native(library, directory, torch.bfloat16)
    [other] = set(directory.glob("codes-*.bin")) - {before}
    assert other.stat().st_size < before.stat().st_size


def test_of_two_engines_that_pack_at_once_one_provides_the_file(library, tmp_path, monkeypatch):
    directory = link(make_file(tmp_path / "m.gguf", Kind.Q4_0, True), tmp_path / "out")
    write, inodes = stored.StoredMatrices._write, []

    def write_late(matrices, data):
        monkeypatch.undo()
        make_native(library, directory)
        inodes.extend(path.stat().st_ino for path in directory.glob("codes-*.bin"))
        write(matrices, data)

    monkeypatch.setattr(stored.StoredMatrices, "_write", write_late)
    make_native(library, directory)
    assert [path.stat().st_ino for path in directory.glob("codes-*.bin")] == inodes


def test_an_engine_keeps_codes_unless_a_dtype_is_given(tmp_path):
    path = link(make_file(tmp_path / "m.gguf", Kind.Q4_1, True), tmp_path / "out")
    kept, plain = (make_core(path, **options) for options in ({"dtype": "auto"}, {"dtype": "float32"}))
    assert kept.executor.decoder.quantization == "gguf"
    assert plain.executor.decoder.quantization == "none"
    assert "gguf" not in plain.executor.decoder.attention


def test_a_file_that_has_gone_is_named(tmp_path):
    path = make_file(tmp_path / "m.gguf", Kind.Q4_0, True)
    directory = link(path, tmp_path / "out")
    path.unlink()
    with pytest.raises(ModelError, match=r"m\.gguf"):
        GGUFTensors.open(directory)

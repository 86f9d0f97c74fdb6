"""Receipts: each is compared as a whole, and each part of what it names changes it."""

from array import array
from hashlib import sha256

import msgspec
import pytest

from radix import Namespace
from runtime.features.chunks.documents.plan import DocumentPrompt
from runtime.features.diffusion.ask import DiffusionParams
from runtime.frontend.output import Encoded, Output
from runtime.params import SamplingParams
from runtime.protocol import ModelInfo
from server.generation import receipts

INFO = dict.fromkeys(field.name for field in msgspec.structs.fields(ModelInfo))
TOKENS, OUTPUT = array("i", [1, 2, 3]).tobytes(), Output(0, 0, "r", token_ids=[4, 5])
PLAIN = {
    "weights": "w",
    "build": "b",
    "prompt": sha256(TOKENS).hexdigest(),
    "output": sha256(array("i", [4, 5]).tobytes()).hexdigest(),
    "engine": {"dtype": "float32", "device": "cpu", "kernels": "native", "code": "ramet"},
    "parameters": {},
    "exact": True,
}
DOCUMENTS = DocumentPrompt.__new__(DocumentPrompt)


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"namespace": Namespace("a", "salt", adapter="d")}, {"adapter": "d"}),
        ({"namespace": Namespace("a", "salt")}, {}),
        ({"sampling": SamplingParams(temperature=0.5, seed=3)}, {"parameters": {"temperature": 0.5, "seed": 3}}),
        ({"prompt": DOCUMENTS}, {"exact": False}),
        ({"decoding": DiffusionParams()}, {"exact": False}),
    ],
)
def test_a_receipt(monkeypatch, given, changed):
    monkeypatch.setattr(receipts, "_weights", {"dir": "w"}.get)
    monkeypatch.setattr(receipts, "_build", lambda: "b")
    engine = {"dtype": "float32", "device": "cpu", "attention_backend": "native", "model_impl": "ramet", "path": "dir"}
    fields = {"prompt": [1, 2, 3], "tokens": TOKENS} | given
    submission = Encoded(**fields)
    assert receipts.receipt_of(submission, OUTPUT, ModelInfo(**INFO | engine)) == PLAIN | changed


def test_every_file_that_decides_answers_changes_the_weights_and_no_other_does(tmp_path):
    deciding = ["a.safetensors", "b.safetensors", "m.gguf", "p.bin", "config.json", "tokenizer.json", "tokenizer.model"]
    seen = {receipts._weights.__wrapped__(str(tmp_path))}
    for name in deciding:
        for content in ("x", "y"):
            (tmp_path / name).write_text(content)
            seen.add(receipts._weights.__wrapped__(str(tmp_path)))
    assert len(seen) == 1 + 2 * len(deciding)
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    assert len(seen | {receipts._weights.__wrapped__(str(tmp_path))}) == 2 + 2 * len(deciding), "a name counts"


def test_code_and_kernels_change_the_build_and_nothing_else_does(tmp_path, monkeypatch):
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(receipts, "_PACKAGES", ("pack",))
    seen = [receipts._build.__wrapped__()]
    for name in ("a.py", "inner/b.py", "inner/kernel.so"):
        (tmp_path / "pack" / name).write_text("x = 1")
        seen.append(receipts._build.__wrapped__())
    assert len(set(seen)) == 4
    (tmp_path / "pack" / "README.md").touch()
    assert receipts._build.__wrapped__() == seen[-1]

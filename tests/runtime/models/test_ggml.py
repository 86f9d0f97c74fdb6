"""GGUF's quantised types as codes, against the library's own numbers."""

import gguf
import numpy as np
import pytest

from runtime.errors import ModelError
from runtime.models.ggml import decode, encode

# float16 fields of a block: place, and range of drawn values.
FIELDS = {
    "Q4_0": [(0, 1)],
    "Q4_1": [(0, 1), (2, 1)],
    "Q5_0": [(0, 1)],
    "Q5_1": [(0, 1), (2, 1)],
    "Q8_0": [(0, 1)],
    "Q4_K": [(0, 0.01), (2, 0.01)],
    "Q5_K": [(0, 0.01), (2, 0.01)],
    "Q6_K": [(208, 0.001)],
    "MXFP4": [],
}


def random_rows(kind: str, n: int, k: int) -> np.ndarray:
    """uint8 [n, bytes of a row]: every bit of a block is drawn."""
    random = np.random.default_rng(n + k)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    for at, largest in FIELDS[kind]:
        drawn = random.uniform(-largest, largest, (n, k // values)).astype(np.float16)
        blocks[..., at : at + 2] = drawn.view(np.uint8).reshape(n, -1, 2)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(115, 126, (n, k // values))
    return blocks.reshape(n, -1)


def dequantized(rows: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(len(rows), -1)


@pytest.mark.parametrize("kind", FIELDS)
def test_codes_keep_every_bit(kind):
    rows = random_rows(kind, 5, 512)
    codes = decode(rows, kind)
    assert codes.codes.max() < 2**codes.bits
    np.testing.assert_array_equal(codes.values(), dequantized(rows, kind))


def test_other_types_are_refused():
    with pytest.raises(KeyError):
        decode(np.zeros((1, 84), np.uint8), "Q2_K")
    far = random_rows("MXFP4", 1, 32)
    far[0, 0] = 200
    with pytest.raises(ModelError, match="beyond float16"):
        decode(far, "MXFP4")
    far[0, 1:] = 0
    assert (decode(far, "MXFP4").values() == 0).all()


@pytest.mark.parametrize(("bits", "error"), [(4, 0.6 / 15), (8, 0.6 / 254)])
def test_rounding_is_within_half_a_step(bits, error):
    weight = np.random.default_rng(0).standard_normal((7, 100)).astype(np.float32)
    weight[3, 32:64] = 0
    got = encode(weight, bits).values()[:, :100]
    groups = np.pad(weight, ((0, 0), (0, 28))).reshape(7, 4, 32)
    extent = groups.max(2) - groups.min(2) if bits == 4 else 2 * np.abs(groups).max(2)
    assert (np.abs(got - weight) <= error * extent.repeat(32, axis=1)[:, :100] + 1e-3 * np.abs(weight)).all()

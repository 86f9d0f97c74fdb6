"""GGUF's quantised types as codes with scales, which keep every weight exactly."""

from dataclasses import dataclass

import numpy as np

from runtime.errors import ModelError

_CHUNK = 256  # k that share the factors of nested scales
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(slots=True)
class Codes:
    """Weights [n, k]: scale * code + minimum, or scale * (code - 2 ** (bits - 1)) without minima.

    Codes of MXFP4's floats stand for twice their value, whole numbers from -12 to 12, which the scale multiplies.

    Nested scales are int8, of which all of 256 k are multiples of one float16 factor; nested minima likewise.

    Attributes:
        bits: of a code.
        codes: uint8 [n, k].
        scales, minima: float16, or int8 if nested, [n, k / group].
        scale_factors, minimum_factors: float16 [n, k / 256].
        are_floats: whether codes are MXFP4's floats.
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None
    scale_factors: np.ndarray | None = None
    minimum_factors: np.ndarray | None = None
    are_floats: bool = False

    @property
    def group(self) -> int:
        """The number of k that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> np.ndarray:
        """float32 [n, k]."""
        scales = _nested(self.scales, self.scale_factors)
        codes = self.codes.reshape(*scales.shape, -1)
        if self.are_floats:
            weights = scales[..., None] * _MXFP4[codes]
        elif self.minima is None:
            weights = scales[..., None] * (codes.astype(np.float32) - 2 ** (self.bits - 1))
        else:
            weights = scales[..., None] * codes + _nested(self.minima, self.minimum_factors)[..., None]
        return weights.reshape(self.codes.shape)


def _nested(scales: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    if factors is None:
        return scales.astype(np.float32)
    return scales * factors.astype(np.float32).repeat(scales.shape[1] // factors.shape[1], axis=1)


def decode(data: np.ndarray, kind: str) -> Codes:
    """The codes of rows of GGUF's blocks, uint8 [n, bytes of a row]. Raises KeyError for a type without codes."""
    return _DECODERS[kind](data)


def can_decode(kind: str) -> bool:
    """Whether `decode` takes a type."""
    return kind in _DECODERS


def _blocks(data: np.ndarray, size: int, *widths: int) -> list[np.ndarray]:
    """Parts [n, blocks, width] of each block."""
    blocks = data.reshape(len(data), -1, size)
    return np.split(blocks, np.cumsum(widths)[:-1], axis=2)


def _halves(part: np.ndarray) -> np.ndarray:
    """float16 [n, blocks] of parts of two bytes."""
    return np.ascontiguousarray(part).view(np.float16)[..., 0]


def _nibbles(part: np.ndarray) -> np.ndarray:
    """uint8 [n, blocks, 2 * width]: the lower halves of the bytes, then the upper ones."""
    return np.concatenate((part & 15, part >> 4), axis=2)


def _flat(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(len(codes), -1)


def _fifth_bits(part: np.ndarray) -> np.ndarray:
    return np.unpackbits(part, axis=2, bitorder="little") << 4


def _q4_0(data: np.ndarray) -> Codes:
    scales, low = _blocks(data, 18, 2, 16)
    return Codes(4, _flat(_nibbles(low)), _halves(scales))


def _q4_1(data: np.ndarray) -> Codes:
    scales, minima, low = _blocks(data, 20, 2, 2, 16)
    return Codes(4, _flat(_nibbles(low)), _halves(scales), _halves(minima))


def _q5_0(data: np.ndarray) -> Codes:
    scales, high, low = _blocks(data, 22, 2, 4, 16)
    return Codes(5, _flat(_nibbles(low) | _fifth_bits(high)), _halves(scales))


def _q5_1(data: np.ndarray) -> Codes:
    scales, minima, high, low = _blocks(data, 24, 2, 2, 4, 16)
    return Codes(5, _flat(_nibbles(low) | _fifth_bits(high)), _halves(scales), _halves(minima))


def _q8_0(data: np.ndarray) -> Codes:
    scales, signed = _blocks(data, 34, 2, 32)
    return Codes(8, _flat(signed ^ 128), _halves(scales))


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima, int8 [n, groups], of 12 bytes for each 8 groups: 6 bits each."""
    first, second, third = np.split(packed, 3, axis=2)
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=2)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=2)
    return _flat(scales).view(np.int8), _flat(minima).view(np.int8)


def _k_nibbles(part: np.ndarray) -> np.ndarray:
    """uint8 [n, blocks, 256] of 128 bytes, each 32 of which hold 32 codes in the lower and the next 32 in the upper."""
    pieces = part.reshape(*part.shape[:2], 4, 32)
    return np.stack((pieces & 15, pieces >> 4), axis=3).reshape(*part.shape[:2], 256)


def _q4_k(data: np.ndarray) -> Codes:
    factors, minimum_factors, packed, low = _blocks(data, 144, 2, 2, 12, 128)
    scales, minima = _k_scales(packed)
    return Codes(4, _flat(_k_nibbles(low)), scales, minima, _halves(factors), -_halves(minimum_factors))


def _q5_k(data: np.ndarray) -> Codes:
    factors, minimum_factors, packed, high, low = _blocks(data, 176, 2, 2, 12, 32, 128)
    scales, minima = _k_scales(packed)
    # Bit i of byte j belongs to code 32 i + j.
    fifth = np.unpackbits(high[..., None], axis=3, bitorder="little").swapaxes(2, 3) << 4
    codes = _flat(_k_nibbles(low)) | _flat(fifth)
    return Codes(5, codes, scales, minima, _halves(factors), -_halves(minimum_factors))


def _q6_k(data: np.ndarray) -> Codes:
    low, high, scales, factors = _blocks(data, 210, 128, 64, 16, 2)
    shape = low.shape[:2]
    # Each 128 codes: 64 bytes of lower bits, in two runs of 32; their upper bits are 2 of each of 32 bytes.
    runs = low.reshape(*shape, 2, 1, 64)
    lower = np.concatenate((runs & 15, runs >> 4), axis=3).reshape(*shape, 2, 4, 32)
    upper = high.reshape(*shape, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return Codes(6, _flat(lower | upper << 4), _flat(scales).view(np.int8), None, _halves(factors))


def _mxfp4(data: np.ndarray) -> Codes:
    exponents, low = _blocks(data, 17, 1, 16)
    return mxfp4_codes(_nibbles(low), exponents[..., 0])


def mxfp4_codes(nibbles: np.ndarray, exponents: np.ndarray) -> Codes:
    """Codes of MXFP4 numbers uint8 [n, blocks, 32] and exponents uint8 [n, blocks]. Raises ModelError.

    The numbers are 2 ** (exponent - 128) times whole ones from -12 to 12.
    """
    # A block of zeros may have any exponent. 8 is minus zero.
    used = np.where((nibbles & 7).any(axis=2), exponents, 128).astype(np.int32)
    if used.min() < 104 or used.max() > 143:
        raise ModelError("an MXFP4 exponent is beyond float16; --quantization none unpacks the weights")
    return Codes(4, _flat(nibbles), np.ldexp(np.float16(1), used - 128), are_floats=True)


_DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def encode(weight: np.ndarray, bits: int) -> Codes:
    """Weights float32 [n, k] rounded to 4 or 8 bits, with a scale for each 32 k: 8 without minima, 4 with."""
    n, k = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -k % 32))).reshape(n, -1, 32)
    if bits == 8:
        scales = (np.abs(padded).max(2) / 127).astype(np.float16)
        minima, zero = None, np.float32(128)
    else:
        minima = padded.min(2).astype(np.float16)
        scales = ((padded.max(2) - minima) / 15).astype(np.float16)
        zero = -minima.astype(np.float32)[..., None]
    steps = scales.astype(np.float32)[..., None]
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)
    levels = padded * inverse + zero if bits == 8 else (padded + zero) * inverse
    codes = np.clip(np.rint(levels), 0, 2**bits - 1).astype(np.uint8)
    return Codes(bits, _flat(codes), scales, minima)

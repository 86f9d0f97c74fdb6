"""Codes with scales in the layout of the kernels' panels (`src/matrix.h`)."""

from collections.abc import Callable

import numpy as np

from runtime.execution.native import library as c
from runtime.models.ggml import Codes

_CHUNK = 256
# Rows that are packed at once, a multiple of any panel's columns.
_ROWS = 2048


def describe_codes(weight: Codes, n: int, paired: bool) -> c.Matrix:
    """The matrix of n rows like these, without its data."""
    return c.Matrix(
        n=n,
        k=weight.codes.shape[1],
        storage=c.CODES,
        is_paired=paired,
        bits=weight.bits,
        group=weight.group,
        has_minima=weight.minima is not None,
        is_nested=weight.scale_factors is not None,
        is_float=weight.are_floats,
    )


def pack_into(to: np.ndarray, matrix: c.Matrix, read: Callable[[np.ndarray], Codes], panel: int) -> None:
    """Write a matrix, of which `read` gives the codes of some rows, into its bytes `to`."""
    half = matrix.n // 2 if matrix.is_paired else matrix.n
    at = 0
    for first in range(0, half, _ROWS):
        rows = np.arange(first, min(first + _ROWS, half))
        if matrix.is_paired:
            rows = np.concatenate((rows, half + rows))
        panels = pack_codes(read(rows), bool(matrix.is_paired), panel).reshape(-1)
        to[at : at + len(panels)] = panels
        at += len(panels)
    assert at == len(to)


def pack_codes(weight: Codes, paired: bool, panel: int) -> np.ndarray:
    """uint8, the bytes of the matrix in panels of `panel` columns."""
    rows = panel_rows(len(weight.codes), paired, panel)
    k = weight.codes.shape[1]
    pieces = []
    for first in range(0, k, _CHUNK):
        last = min(first + _CHUNK, k)
        groups = slice(first // weight.group, last // weight.group)
        pieces += _pack_levels(_columns(weight.codes[:, first:last], rows), weight.bits)
        scales = [part[:, groups] for part in (weight.scales, weight.minima) if part is not None]
        # [panels, groups, scales or minima, columns]
        pieces.append(np.stack([_columns(part, rows) for part in scales]).transpose(1, 3, 0, 2))
        if weight.scale_factors is not None:
            factors, chunk = (weight.scale_factors, weight.minimum_factors), slice(first // _CHUNK, first // _CHUNK + 1)
            pieces += [_columns(part[:, chunk], rows) for part in factors if part is not None]
    flat = [np.ascontiguousarray(piece).reshape(len(rows), -1).view(np.uint8) for piece in pieces]
    return np.concatenate(flat, axis=1)


def panel_rows(n: int, paired: bool, panel: int) -> np.ndarray:
    """int64 [panels, panel]: the row of each column, -1 for padding."""
    if not paired:
        rows = np.arange(-(-n // panel) * panel).reshape(-1, panel)
        return np.where(rows < n, rows, -1)
    half = np.arange(-(-n // panel) * (panel // 2)).reshape(-1, 1, panel // 2)
    rows = np.where(half < n // 2, half + np.array([[0], [n // 2]]), -1)
    return rows.reshape(-1, panel)


def _columns(part: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[panels, panel, width] of [n, width]; padding is 0."""
    taken = part[rows]
    taken[rows < 0] = 0
    return taken


def _pack_levels(codes: np.ndarray, bits: int) -> list[np.ndarray]:
    """The codes [panels, panel, count] of a chunk, and their further bits."""
    panels, panel, count = codes.shape
    # uint32 [panels, count / 4, panel]: four codes each.
    fours = np.ascontiguousarray(codes).view(np.uint32).swapaxes(1, 2)
    if bits == 8:
        return [fours]
    low = np.ascontiguousarray(fours & 0x0F0F0F0F).reshape(panels, count // 8, 2, panel)
    pieces = [low[:, :, 0] | low[:, :, 1] << 4]
    if bits > 4:
        # Each byte of a plane has the further bits of 8 (5 bits) or 4 codes (6 bits), one after the other.
        high = np.ascontiguousarray(fours) >> 4 & 0x01010101 * (2 ** (bits - 4) - 1)
        shared = 8 // (bits - 4)
        # [panels, planes, pairs of fours, two fours, two halves of a panel, lanes]: the middle three share a byte.
        parts = high.reshape(panels, -1, shared // 4, 2, 2, panel // 2).swapaxes(3, 4)
        parts = parts.reshape(panels, -1, shared, panel // 2)
        shifts = np.arange(0, 8, bits - 4, dtype=np.uint32)[:, None]
        pieces.append(np.bitwise_or.reduce(parts << shifts, axis=2))
    return pieces

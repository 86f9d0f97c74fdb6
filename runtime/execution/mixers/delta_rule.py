"""The gated delta rule for chunks of many sequences (Yang et al., 2024, section 3.3), in float32.

Let S be the state before a chunk, g_t the product of the decays of its rows up to t, and u_t what row t adds along its
key: beta_t (v_t - a_t k_t S_t-1). The state behind row t is g_t S + sum over i <= t of (g_t / g_i) k_i (x) u_i. So the
u of a chunk solve a triangular system, (I + A) U = beta (V - g K S) with A_ti = beta_t (g_t / g_i) k_t k_i for i < t.
It is solved for V and for g K, for all chunks at once. Then each wave multiplies these solutions with its states.
"""

from dataclasses import dataclass

import torch

from runtime.execution.mixers.state_plan import Chunks, Write


@dataclass(slots=True)
class DeltaRows:
    """The rows of chunks, with zeros where there is none.

    Attributes:
        q, k: float32 [chunks, heads, length, k_dim], normalised; q is scaled.
        v: float32 [chunks, heads, length, v_dim].
        log_decay, beta: float32 [chunks, heads, length].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def advance_chunks(rows: DeltaRows, chunks: Chunks, matrices: torch.Tensor) -> torch.Tensor:
    """Outputs, float32 [chunks, heads, length, v_dim]. Reads states of `matrices` [slots, heads, k_dim, v_dim], and
    stores those that are wanted.
    """
    parts = _Parts.of(rows)
    heads = rows.q.shape[1]
    state = matrices[chunks.slots]
    _store(chunks.writes[0], state, matrices)
    outputs, start = [], 0
    for count, write in zip(chunks.waves, chunks.writes[1:], strict=True):
        these = slice(start * heads, (start + count) * heads)
        outputs.append(parts.advance(these, state[:count].flatten(0, 1)))
        _store(write, state, matrices)
        start += count
    return torch.cat(outputs).unflatten(0, (-1, heads))


def _store(write: Write | None, state: torch.Tensor, matrices: torch.Tensor) -> None:
    if write is not None:
        wanted = state[: len(write.slots)] if write.which is None else state[write.which]
        matrices.index_copy_(0, write.slots, wanted)


@dataclass(slots=True)
class _Parts:
    """What a wave multiplies with states, for each chunk and head.

    Attributes:
        added: [n, length, v_dim], U for states of zeros.
        erased: [n, length, k_dim], what U loses for each unit of the state.
        queries: [n, length, k_dim], g Q.
        seen: [n, length, length], what a row's output has of each row's U.
        kept: [n, 1, 1], the last g.
        keys: [n, k_dim, length], what the next state has of each row's U.
    """

    added: torch.Tensor
    erased: torch.Tensor
    queries: torch.Tensor
    seen: torch.Tensor
    kept: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, rows: DeltaRows) -> "_Parts":
        q, k, v = (part.flatten(0, 1) for part in (rows.q, rows.k, rows.v))
        log_decay, beta = rows.log_decay.flatten(0, 1), rows.beta.flatten(0, 1)[..., None]
        length, keys = q.shape[1], k.transpose(1, 2)
        since = log_decay.cumsum(1).exp()[..., None]
        added, erased, seen = beta * v, beta * since * k, torch.bmm(q, keys)
        if length > 1:
            # Each quotient is a sum of its own: a difference of two long sums would round more.
            between = log_decay[..., None].expand(-1, -1, length).tril(-1).cumsum(1).exp().tril()
            # Of the system, only the part below the diagonal is read.
            system, both = torch.bmm(beta * k, keys) * between, torch.cat((added, erased), dim=2)
            solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
            added, erased = solved.split((v.shape[2], k.shape[2]), dim=2)
            seen, keys = seen * between, keys * between[:, -1:]
        return cls(added, erased, q * since, seen, since[:, -1:], keys)

    def advance(self, these: slice, state: torch.Tensor) -> torch.Tensor:
        """Outputs [n, length, v_dim] of some chunks; updates their states [n, k_dim, v_dim]."""
        change = torch.baddbmm(self.added[these], self.erased[these], state, alpha=-1)
        out = torch.bmm(self.queries[these], state).baddbmm_(self.seen[these], change)
        state.mul_(self.kept[these]).baddbmm_(self.keys[these], change)
        return out

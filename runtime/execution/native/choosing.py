"""The choice of tokens by the kernels."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from runtime.execution.native import library as c
from runtime.execution.native.packed import Team
from runtime.sampler_state import TokenChoice


class NativeChoosing:
    """See `Choosing`."""

    def __init__(self, team: Team, argmax: Callable[[torch.Tensor], torch.Tensor]):
        self._team, self._library = team, team.library
        self.argmax = argmax

    def choose(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        logits = logits.contiguous()
        arrays: list[np.ndarray] = []  # which the structures point to

        def pointer(values: Sequence[float], dtype: type) -> int | None:
            if not values:
                return None
            arrays.append(np.array(values, dtype))
            return arrays[-1].ctypes.data

        structs = (c.ChoiceStruct * len(choices))()
        for i, one in enumerate(choices):
            p, seen, allowed = one.params, one.seen, one.allowed
            counted = (None, None) if seen is None else (seen.ids.buffer_info()[0], seen.counts.data_ptr())
            structs[i] = c.ChoiceStruct(
                one.row,
                max(p.top_k, 0),
                one.stream is not None,
                one.stream or 0,
                len(p.logit_bias),
                0 if seen is None else len(seen.ids),
                len(one.barred),
                pointer([*p.logit_bias], np.int64),
                pointer([*p.logit_bias.values()], np.float32),
                *counted,
                pointer(one.barred, np.int64),
                None if allowed is None else allowed.ctypes.data,
                p.divisor,
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.frequency_penalty,
                p.presence_penalty,
            )
        out = np.empty(len(choices), dtype=np.int64)
        self._library.choose(
            self._team.handle, logits.data_ptr(), logits.shape[1], structs, len(choices), out.ctypes.data
        )
        return torch.from_numpy(out)

    def measure(self, logits: torch.Tensor, rows: Sequence[int], tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
        logits, tokens, index = logits.contiguous(), tokens.contiguous(), np.array(rows, np.int64)
        count, top = len(index), min(top, logits.shape[1])
        chosen, values = torch.zeros(count), torch.zeros(count, top)
        ids = torch.zeros(count, top, dtype=torch.int64)
        outputs = chosen.data_ptr(), ids.data_ptr(), values.data_ptr()
        inputs = logits.data_ptr(), logits.shape[1], index.ctypes.data, tokens.data_ptr()
        self._library.measure(self._team.handle, *inputs, count, top, *outputs)
        return [chosen, ids, values]

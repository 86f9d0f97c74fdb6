"""The native drawing of tokens against torch's."""

import numpy as np
import pytest
import torch

from runtime.execution.native.packed import Team
from runtime.sampling.sampler import draw as reference


def draw(library, rows, divisors, noise):
    out, given = np.empty(len(rows), np.int64), np.array(divisors, np.float32)
    team = Team(library, 2)
    library.draw(team.handle, rows.data_ptr(), *rows.shape, given.ctypes.data, noise.data_ptr(), out.ctypes.data)
    return torch.from_numpy(out)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1000, 49152])
def test_random_rows(library, columns):
    generator = torch.Generator().manual_seed(columns)
    rows, divisors = 8 * torch.randn(50, columns, generator=generator), torch.linspace(0.1, 2, 50)
    noise = torch.empty(50, -(-columns // 64) + 64).exponential_(generator=generator)
    noise[3] = 0
    rows[4, columns // 2 :] = -torch.inf
    rows[4, 0] = 0
    wanted = reference((rows / divisors[:, None]).softmax(-1), noise)
    got = draw(library, rows, divisors.tolist(), noise)
    assert torch.equal(got, wanted)
    for row in (0, 4, 49):
        assert draw(library, rows[row : row + 1], [divisors[row]], noise[row : row + 1]) == got[row]


def test_rows_without_a_distribution(library):
    rows, noise = torch.full((3, 100), -torch.inf), torch.ones(3, 66)
    rows[1], rows[2, 7] = torch.nan, torch.inf
    assert draw(library, rows, [1, 1, 1], noise).tolist() == [-1, -1, -1]

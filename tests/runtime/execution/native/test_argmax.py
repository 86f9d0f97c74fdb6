"""The native argmax against torch's."""

import pytest
import torch

from runtime.execution.native.packed import Team


def argmax(library, rows):
    out = torch.empty(len(rows), dtype=torch.int64)
    team = Team(library, 2)
    library.argmax(team.handle, rows.data_ptr(), *rows.shape, out.data_ptr())
    return out


@pytest.mark.parametrize("columns", [1, 7, 64, 65, 1000, 49152])
def test_random_rows(library, columns):
    rows = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns))
    assert torch.equal(argmax(library, rows), rows.argmax(-1))


def test_the_first_of_equals(library):
    rows = torch.zeros(3, 300)
    rows[1, [70, 290]] = 5.0
    rows[2] = -torch.inf
    assert argmax(library, rows).tolist() == [0, 70, 0]


def test_what_is_no_number_wins(library):
    """As in torch: a look at the winner tells whether the row is sound."""
    rows = torch.zeros(4, 300)
    rows[0, 299] = rows[1, 3] = torch.nan
    rows[2, 100], rows[2, 7] = torch.inf, -torch.inf
    assert argmax(library, rows).tolist() == [299, 3, 100, 0]

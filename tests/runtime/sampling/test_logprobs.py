"""Log-probabilities of many rows, which are measured a few at a time."""

import pytest
import torch

from runtime.sampling.sampler import Sampler


@pytest.mark.parametrize("rows", [1, 32, 33, 100])
def test_slices_are_as_the_whole(rows):
    logits = torch.randn((rows, 50), generator=torch.Generator().manual_seed(rows))
    logits[:, 7] = -torch.inf
    report_logprobs = Sampler(50, logits.device).report_logprobs
    tokens = [(3 * row) % 50 for row in range(rows)]
    expected = logits.log_softmax(-1).clamp_min(-9999.0)
    found = report_logprobs(logits, tokens, 50)
    assert [one.token for one in found] == tokens
    for row, one in enumerate(found):
        assert one.logprob == expected[row, one.token].item()
        assert [token for token, _ in one.top] == expected[row].argsort(descending=True, stable=True).tolist()
        assert [value for _, value in one.top] == expected[row].sort(descending=True).values.tolist()
    assert [one.top for one in report_logprobs(logits, tokens, 0)] == [[]] * rows

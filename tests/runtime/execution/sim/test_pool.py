"""The pool of keys and values on the simulated device."""

import torch

from runtime.kv.pool import KVPool


def test_what_is_too_large_for_float8_is_its_largest_value(device):
    cuda = torch.device("cuda")
    pool = KVPool(1, 1, 4, 1, 2, torch.float8_e4m3fn, cuda)
    k = torch.tensor([[[500.0, -1e5]]]).pin_memory().to(cuda, non_blocking=True)
    pool.write(0, torch.zeros(1, dtype=torch.int64, device=cuda), k, k)
    assert pool.k[0, 0].float().tolist() == [[448.0, -448.0]]

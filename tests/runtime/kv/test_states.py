"""The pool of recurrent states."""

import torch

from runtime.kv.states import StatePool

LAYOUT = [(3, 2), (2, 4, 5)]


def test_a_slot_is_copied_cleared_and_written_to_the_bit_and_others_stay():
    pool = StatePool(LAYOUT, 4, torch.device("cpu"))
    for number, tensor in enumerate(pool.tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.manual_seed(number)))
    size = pool.state_bytes
    before = [pool.read(slot, size) for slot in range(4)]
    assert {len(data) for data in before} == {pool.state_bytes} == {4 * (3 * 2 + 2 * 4 * 5)}
    assert pool.read(1, size + 7).tolist() == before[1].tolist() + [0] * 7
    pool.copy(0, 2)
    pool.clear(1)
    pool.write(3, torch.cat((before[1], torch.ones(7, dtype=torch.uint8))))  # as read from whole pages
    after = [pool.read(slot, size).tolist() for slot in range(4)]
    assert after == [before[0].tolist(), [0] * pool.state_bytes, before[0].tolist(), before[1].tolist()]

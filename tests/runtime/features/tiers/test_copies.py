"""Copies of pages for the tiers."""

from array import array

import pytest
import torch

from runtime.features.tiers.copies import Copies
from runtime.features.tiers.host import HostStore
from runtime.features.tiers.worker import TierWorker
from runtime.kv.pool import KVPool
from tests.runtime.features.tiers.conftest import FORM, blocks_of


@pytest.mark.parametrize("has_room", [False, True])
def test_a_page_is_copied_at_once_only_if_its_copy_has_room(monkeypatch, has_room):
    """As on a GPU, where the copy takes memory and time of the step."""
    pool = KVPool(1, 8, 4, 1, 8, torch.float32, torch.device("cpu"))
    store, block = HostStore(1 << 20), blocks_of("alice", 1)[0]
    worker = TierWorker(FORM, [store], queue_bytes=(1 << 20) * has_room)
    copies, read, copied = Copies(pool, worker), pool.read_pages, []
    copies._at_once = True
    monkeypatch.setattr(pool, "read_pages", lambda pages: (copied.append([*pages]), read(pages))[1])
    assert copies.add(block, array("i", [2, 3])) is has_room
    assert copied == [[2, 3]] * has_room
    worker.drain()
    assert store.contains_many([block.key]) == [has_room]
    worker.close(0)

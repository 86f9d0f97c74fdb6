"""The threads that read and write blocks."""

import threading

import pytest

from runtime.features.tiers.block import Format
from runtime.features.tiers.host import HostStore
from runtime.features.tiers.lane import Lane
from runtime.features.tiers.worker import TierWorker
from tests.runtime.features.tiers.conftest import FORM, FlakyStore, blocks_of, held, payload_of

BLOCKS = blocks_of("alice", 6)
SIZE = len(payload_of(BLOCKS[0]))
LIMIT_S = 60


@pytest.fixture
def host():
    return HostStore(1 << 20)


@pytest.fixture
def start():
    workers = []

    def start(*stores, **options):
        workers.append(TierWorker(FORM, stores, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close(0)


def test_a_drain_has_one_limit_for_all_queues(start, host, flaky, monkeypatch):
    now, waits = [0.0], []

    def hang(lane, limit_s):
        waits.append(limit_s)
        now[0] += limit_s

    worker = start(flaky, host, clock=lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "wait", hang)
        worker.drain(10.0)
    assert waits == [10.0, 0.0, 0.0]


def write(worker, blocks):
    for block in blocks:
        assert worker.write(block, lambda block=block: payload_of(block), SIZE)
    settle(worker)


def settle(worker):
    """Wait until all that was accepted is written."""
    worker._gatherer.run(lambda: None).result(LIMIT_S)
    for tier in worker._tiers.values():
        tier.lane.run(lambda: None).result(LIMIT_S)


def load(worker, blocks=BLOCKS, **options):
    found = worker.load(blocks, SIZE, **options).result(LIMIT_S)
    assert [bytes(loaded.payload) for loaded in found] == [payload_of(block) for block in blocks[: len(found)]]
    return [loaded.tier for loaded in found]


def test_blocks_are_written_to_all_stores_and_loaded_from_the_first(start, host, flaky):
    worker = start(flaky, host)
    assert worker.names == ["host", "disk"]
    write(worker, BLOCKS[:4])
    assert [len(held(store)) for store in (host, flaky)] == [4, 4]
    assert load(worker) == ["host"] * 4
    host.delete([block.key for block in BLOCKS[1:3]])
    assert load(worker) == ["host", "disk", "disk", "host"]
    assert load(worker) == ["host"] * 4, "loaded blocks stay in the host's memory"
    flaky.delete([BLOCKS[0].key])
    host.delete([BLOCKS[0].key])
    assert load(worker) == []
    assert load(worker, BLOCKS[1:]) == ["host"] * 3


def test_a_block_that_is_there_is_used_again_and_not_written(start, flaky):
    worker = start(flaky)
    write(worker, BLOCKS[:2])
    write(worker, BLOCKS[:1])
    assert held(flaky) == [BLOCKS[1].key, BLOCKS[0].key]
    assert flaky.calls.count("put") == 2


def test_a_payload_that_cannot_be_read_keeps_no_other_from_being_written(start, flaky):
    worker = start(flaky)

    def fail():
        raise ValueError("no pool")

    assert worker.write(BLOCKS[0], fail, SIZE)
    write(worker, BLOCKS[1:2])
    assert load(worker, BLOCKS[1:2]) == ["disk"]


def test_what_the_queues_have_no_room_for_is_dropped_and_counted(start, host, flaky):
    worker = start(host, flaky, queue_bytes=2 * SIZE)
    flaky.gate.clear()
    for block in BLOCKS:
        assert worker.write(block, lambda block=block: payload_of(block), SIZE)
        worker._gatherer.run(lambda: None).result(LIMIT_S)
        worker._tiers["host"].lane.run(lambda: None).result(LIMIT_S)
    assert worker.states()["disk"].counts["dropped"] == 4
    assert worker.states()["disk"].queued_bytes == 2 * SIZE
    assert worker.num_dropped == 0
    flaky.gate.set()
    settle(worker)
    assert (host.usage().blocks, flaky.usage().blocks) == (6, 2)
    assert worker.states()["disk"].queued_bytes == 0

    held = threading.Event()
    assert worker.write(BLOCKS[0], lambda: held.wait(LIMIT_S) and payload_of(BLOCKS[0]), SIZE)
    assert worker.write(BLOCKS[1], lambda: payload_of(BLOCKS[1]), SIZE)
    assert not worker.write(BLOCKS[2], lambda: payload_of(BLOCKS[2]), SIZE)
    assert worker.num_dropped == 1
    held.set()


def test_a_block_that_is_not_what_it_should_be_goes_and_the_next_store_is_asked(start, flaky):
    worker = start(flaky)
    write(worker, BLOCKS[:3])
    stored = bytearray(b"".join(FORM.encode(BLOCKS[1], payload_of(BLOCKS[1]))))
    stored[-1] ^= 1
    flaky.put(BLOCKS[1].key, [stored], "alice")
    assert load(worker) == ["disk"]
    assert flaky.contains_many([block.key for block in BLOCKS[:3]]) == [True, False, True]
    assert worker.states()["disk"].counts["mismatch_checksum"] == 1
    worker = start(flaky, FlakyStore("store"))
    write(worker, BLOCKS[:3])
    flaky.put(BLOCKS[0].key, [b"rubbish"], "alice")
    assert load(worker) == ["store"] * 3


def test_a_store_that_is_slower_than_computing_is_not_read(start, host, flaky):
    worker = start(host, flaky)
    write(worker, BLOCKS[:2])
    for _ in range(50):
        worker._tiers["disk"].rate.measure(s_per_byte=1 / SIZE)  # a second a block
    host.delete([block.key for block in BLOCKS])
    assert load(worker, compute_s=0.5) == []
    assert "get" not in flaky.calls
    assert worker.states()["disk"].counts["too_slow"] == 1
    assert load(worker, compute_s=2.0) == ["disk", "disk"]
    assert load(worker, compute_s=0.5) == ["host", "host"]


def test_no_block_is_read_after_the_time_limit(start, flaky):
    worker = start(flaky)
    write(worker, BLOCKS)
    assert load(worker, limit_s=0) == []
    assert load(worker) == ["disk"] * 6


def test_an_erased_tenant_is_nowhere_not_even_in_a_queue(start, host, flaky):
    worker = start(host, flaky)
    write(worker, BLOCKS[:2])
    write(worker, blocks_of("bob", 3))
    flaky.gate.clear()
    for block in BLOCKS[2:]:
        assert worker.write(block, lambda block=block: payload_of(block), SIZE)
    erasing = worker.erase("alice")
    flaky.gate.set()
    assert erasing.result(LIMIT_S) == {"host": 6, "disk": 6}
    assert {*held(host), *held(flaky)} == {block.key for block in blocks_of("bob", 3)}
    assert load(worker) == []


def test_a_load_that_an_erasure_overtakes_brings_nothing_back(start, host, flaky):
    worker = start(host, flaky)
    write(worker, BLOCKS[:2])
    host.erase(None)
    reached = threading.Event()
    held, get = threading.Event(), flaky.get

    def slow(key):
        data = get(key)
        reached.set()
        assert held.wait(LIMIT_S)
        return data

    flaky.get = slow
    loading = worker.load(BLOCKS, SIZE)
    assert reached.wait(LIMIT_S)
    assert worker.erase("alice").result(LIMIT_S) == {"host": 0, "disk": 2}
    held.set()
    assert loading.result(LIMIT_S) == []
    assert host.usage().blocks == 0


def test_an_erasure_tells_of_a_store_that_failed(start, host, flaky):
    worker = start(host, flaky)
    write(worker, BLOCKS[:1])
    flaky.error = OSError("gone")
    assert worker.erase("alice").result(LIMIT_S) == {"host": 1, "disk": None}
    flaky.error, flaky_gate = None, flaky.gate
    flaky_gate.clear()
    for limit_s in (0.05, 2.0, 30.0):  # until the host's memory has answered in time
        erased = worker.erase("alice", limit_s=limit_s).result(2 * LIMIT_S)
        if erased["host"] is not None:
            break
    assert erased == {"host": 0, "disk": None}
    flaky_gate.set()
    settle(worker)
    assert flaky.usage().blocks == 0


def test_an_erasure_forgets_the_key_first(start, flaky):
    class Cipher:
        name_secret = b""
        error = None

        def erase(self, tenant):
            if self.error:
                raise self.error
            return 1

    worker = TierWorker(Format(FORM.fingerprint, Cipher()), [flaky])
    assert worker.erase("alice").result(LIMIT_S) == {"keys": 1, "disk": 0}
    worker.form.cipher.error = OSError("read-only")
    assert worker.erase("alice").result(LIMIT_S) == {"keys": None, "disk": 0}
    worker.close(0)


def test_closing_writes_what_is_queued(host, flaky):
    worker = TierWorker(FORM, [host, flaky])
    for block in BLOCKS:
        assert worker.write(block, lambda block=block: payload_of(block), SIZE)
    kept = []
    flaky.close = lambda: kept.append(flaky.usage().blocks)
    worker.close(LIMIT_S)
    assert kept == [6]


def test_statistics(start, host):
    worker = start(host)
    write(worker, BLOCKS[:2])
    worker._tiers["host"].usage()
    state = worker.states()["host"]
    assert (state.blocks, state.capacity, state.open) == (2, 1 << 20, True)
    assert state.bytes > 2 * SIZE
    assert state.bytes_per_s == pytest.approx(1e9)
    assert state.counts["written"] == 2

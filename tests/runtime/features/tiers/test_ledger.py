"""KV events of the tiers: they say what each store holds, whatever happened to it."""

from array import array

import msgspec
import pytest

from radix import Namespace, Removed, Stored
from radix.hashes import block_hashes
from runtime.features.kv_events.part import KVEvents
from runtime.features.tiers import ledger
from runtime.features.tiers.files import FileStore
from runtime.features.tiers.host import HostStore
from runtime.features.tiers.worker import TierWorker
from tests.runtime.engine.driver import Driver
from tests.runtime.features.tiers.conftest import FORM, blocks_of
from tests.runtime.features.tiers.engines import draw, evict, open_core
from tests.runtime.features.tiers.test_worker import load, settle, write

LIMIT_S = 60


def told_of(tenant: str, number: int) -> list:
    """The first blocks of a tenant, each with an event of one hash."""
    return [
        block._replace(event=Stored((i,), None, block.tokens, block.namespace))
        for i, block in enumerate(blocks_of(tenant, number))
    ]


ALICE, BOB = told_of("alice", 6), told_of("bob", 2)


class Follower:
    """Hashes of the blocks that stores hold, by tenant, as a consumer of events knows them."""

    def __init__(self, worker: TierWorker):
        self.worker = worker
        self.held: set[tuple[str, str, int]] = set()

    def of(self, store: str) -> str:
        """The tenants' initials and hashes of a store."""
        for name, events in self.worker.ledger.take().items():
            for event in events:
                (value,) = event.hashes
                known = (name, event.namespace.tenant, value)
                assert (known in self.held) == isinstance(event, Removed), "an event that changes nothing"
                self.held ^= {known}
        return " ".join(sorted(f"{tenant[0]}{value}" for name, tenant, value in self.held if name == store))


@pytest.fixture
def start():
    workers = []

    def start(*stores) -> Follower:
        workers.append(TierWorker(FORM, stores))
        return Follower(workers[-1])

    yield start
    for worker in workers:
        worker.close(0)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_bounded_store_tells_of_all_that_comes_and_leaves(start, tmp_path, kind):
    probe = HostStore(1 << 20)
    write(TierWorker(FORM, [probe]), ALICE[:1])
    bound = 4 * probe.usage().bytes
    told = start(HostStore(bound) if kind == "host" else FileStore(tmp_path / "disk", "", bound))
    write(told.worker, ALICE[:3])
    assert told.of(kind) == "a0 a1 a2"
    write(told.worker, ALICE[1:2])
    write(told.worker, ALICE[3:])
    assert told.of(kind) == "a1 a3 a4 a5", "the least recently used made room"
    told.worker.delete(lambda: [ALICE[3].key])
    settle(told.worker)
    write(told.worker, BOB[:1])
    assert told.of(kind) == "a1 a4 a5 b0"
    told.worker.erase("alice").result(LIMIT_S)
    assert told.of(kind) == "b0"


def test_what_others_wrote_is_known_once_it_is_read_and_what_they_evicted_once_it_is_missed(start, flaky):
    write(start(flaky).worker, ALICE[:4])
    told = start(flaky, HostStore(1 << 20))
    assert told.of("disk") == ""
    assert load(told.worker, ALICE[:3]) == ["disk"] * 3
    assert (told.of("disk"), told.of("host")) == ("a0 a1 a2", "a0 a1 a2"), "loaded blocks are kept in the host's memory"
    flaky.delete([ALICE[1].key])
    told.worker.erase("bob").result(LIMIT_S)
    assert told.of("disk") == "a0 a1 a2"
    assert load(told.worker, ALICE) == ["host"] * 3 + ["disk"]
    told.worker._tiers["host"].erase("alice")
    assert load(told.worker, ALICE) == ["disk"]
    assert (told.of("disk"), told.of("host")) == ("a0 a2 a3", "a0")


def test_a_write_that_fails_is_told_of_no_longer(start, flaky):
    told = start(flaky)
    flaky.error = OSError("no device")
    write(told.worker, ALICE[:1])
    assert told.of("disk") == ""


def test_the_oldest_of_too_many_counts_as_gone(start, monkeypatch, flaky):
    monkeypatch.setattr(ledger, "MOST_BLOCKS", 3)
    told = start(flaky)
    write(told.worker, ALICE)
    assert told.of("disk") == "a3 a4 a5"


def test_an_engine_publishes_what_left_the_pool_for_a_tier(ids_dir, tmp_path):
    core = open_core(ids_dir, host_memory=0.1, kv_events=f"ipc://{tmp_path}/e", kv_events_of="all")
    driver, prompt = Driver(core), draw(0, 130)
    driver.add("a", prompt, namespace=Namespace("acme", "s"), max_new_tokens=2)
    driver.run()
    core.settle()
    evict(core)
    core.settle()
    kept = core.part(KVEvents).publisher._kept
    batches = [msgspec.msgpack.decode(kept.read(number)[1])[1] for number in range(kept.next)]
    core.close()
    namespace = Namespace("acme", "s")
    expected = block_hashes(array("i", prompt[:128]).tobytes(), 32, None, namespace)
    stored = {medium: [] for medium in ("GPU", "CPU_PINNED")}
    for event in (event for events in batches for event in events):
        if event["type"] == "BlockStored":
            stored[event["medium"]].append(event)
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU", "the pool's alone are gone"
    for events in stored.values():
        parents = {None, *expected}
        assert [value for event in events for value in event["block_hashes"]] == list(expected)
        assert all(event["parent_block_hash"] in parents and event["cache_salt"] == "acme/s#" for event in events)
        assert [token for event in events for token in event["token_ids"]] == prompt[:128]
    assert [len(event["block_hashes"]) for event in stored["CPU_PINNED"]] == [8, 8], "64 tokens, 8 a page"

"""KV events of a real publisher, followed: from the start, late, over gaps, and of an engine that begins anew."""

import asyncio
from array import array

from radix import Namespace, Removed, Stored
from runtime.config import CacheConfig
from runtime.features.kv_events import replays
from runtime.features.kv_events.publisher import EventPublisher
from server.ray.follower import ReplicaFollower
from server.ray.prefixes import PrefixIndex

EVERYBODY = Namespace()


def stored(*hashes: int) -> Stored:
    return Stored(hashes, None, array("i", range(2 * len(hashes))).tobytes(), EVERYBODY)


class Fleet:
    """A publisher, and an index that follows it."""

    def __init__(self, directory):
        self.endpoints = f"ipc://{directory}/e", f"ipc://{directory}/r"
        self.index = PrefixIndex[str]()
        self.open()

    def open(self) -> None:
        events, replay = self.endpoints
        config = CacheConfig(kv_events=f"{events},{replay}", page_size=2, kv_events_of="hashes")
        self.publisher = EventPublisher(config)

    def follow(self) -> ReplicaFollower[str]:
        return ReplicaFollower(self.index, "a", *self.endpoints)

    async def until(self, blocks: set[int]) -> None:
        """Wait until the index has exactly these."""
        async with asyncio.timeout(60):
            while self.index.held("a") != blocks:
                await asyncio.sleep(0.01)


def test_what_was_before_comes_as_well_and_what_goes_on_is_heard(tmp_path):
    async def scenario() -> None:
        fleet = Fleet(tmp_path)
        fleet.publisher.publish([stored(1, 2, 3), Removed((3,), EVERYBODY)])
        fleet.publisher.publish([stored(3), Removed((1,), EVERYBODY)], "host")  # a tier is no pool
        follower = fleet.follow()
        await fleet.until({1, 2})
        fleet.publisher.publish([stored(4)])
        await fleet.until({1, 2, 4})
        follower.close()
        assert fleet.index.match([1, 2]) == {}, "nobody is followed, so nothing is known"
        fleet.publisher.close()

    asyncio.run(scenario())


def test_a_gap_is_asked_for(tmp_path):
    async def scenario() -> None:
        fleet = Fleet(tmp_path)
        follower = fleet.follow()
        fleet.publisher.publish([stored(1)])
        await fleet.until({1})
        send, fleet.publisher._publish = fleet.publisher._publish, _Nobody()
        fleet.publisher.publish([stored(2)])
        fleet.publisher._publish = send
        fleet.publisher.publish([stored(3)])
        await fleet.until({1, 2, 3})
        follower.close()
        fleet.publisher.close()

    asyncio.run(scenario())


def test_what_is_kept_no_more_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(replays, "KEPT_BATCHES", 3)

    async def scenario() -> None:
        fleet = Fleet(tmp_path)
        for n in range(5):
            fleet.publisher.publish([stored(n)])
        follower = fleet.follow()
        await fleet.until({2, 3, 4})
        follower.close()
        fleet.publisher.close()

    asyncio.run(scenario())


class _Nobody:
    """A socket that loses everything."""

    def send_multipart(self, parts) -> None:
        pass

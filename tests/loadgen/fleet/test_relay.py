"""A relay that is cut loses what a publisher sends, and a follower behind it finds out."""

from __future__ import annotations

import asyncio
from array import array

from loadgen.fleet.relay import Relay
from loadgen.http.local_server import free_port
from radix import Namespace, Stored
from runtime.config import CacheConfig
from runtime.kv.publisher import EventPublisher
from server.ray.follower import Follower
from server.ray.prefixes import PrefixIndex


def test_what_is_lost_is_asked_for_once_events_come_again(tmp_path):
    async def scenario(publisher: EventPublisher, relay: Relay) -> None:
        index = PrefixIndex[str]()
        follower = Follower(index, "a", relay.endpoint, f"ipc://{tmp_path}/replay")

        async def until(blocks: set[int], again: int | None = None) -> None:
            async with asyncio.timeout(60):
                while index.held("a") != blocks:
                    if again is not None:
                        publish(again)
                    publisher.answer_replays()
                    await asyncio.sleep(0.02)

        def publish(block: int) -> None:
            publisher.publish([Stored((block,), None, array("i", [1, 2]).tobytes(), Namespace())])

        await until({1}, again=1)
        relay.cut()
        await asyncio.sleep(0.2)
        publish(2)
        await asyncio.sleep(0.2)
        assert index.held("a") == {1}, "lost on the way"
        relay.mend()
        await until({1, 2, 3}, again=3)
        follower.close()

    publisher = EventPublisher(
        CacheConfig(
            kv_events=f"tcp://127.0.0.1:{free_port()}", kv_events_replay=f"ipc://{tmp_path}/replay", page_size=2
        )
    )
    with Relay(publisher._config.kv_events or "") as relay:
        asyncio.run(scenario(publisher, relay))
    publisher.close()

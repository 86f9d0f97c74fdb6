"""KV events over real sockets, from a real engine."""

import time
from array import array
from collections.abc import Callable

import msgspec
import pytest
import zmq

from radix import Namespace, Stored
from runtime import Engine
from runtime.config import CacheConfig
from runtime.features.kv_events.publisher import EventPublisher


class Consumer:
    """Reads events as a router does: raw msgpack, no code of ours."""

    def __init__(self, context: zmq.Context, endpoint: str):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(endpoint)
        self.blocks: dict[int, tuple] = {}
        self.numbers: list[int] = []

    def take(self, number: bytes, payload: bytes) -> None:
        if self.numbers and int.from_bytes(number, "big") <= self.numbers[-1]:
            return  # came by both ways
        self.numbers.append(int.from_bytes(number, "big"))
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockStored":
                parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
                assert event["medium"] == "GPU"
                assert len(tokens) == size * len(event["block_hashes"])
                for i, value in enumerate(event["block_hashes"]):
                    self.blocks[value] = (parent, tuple(tokens[i * size : (i + 1) * size]))
                    parent = value
            else:
                for value in event["block_hashes"]:
                    self.blocks.pop(value, None)  # it may have been stored before this consumer was heard

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> bool:
        """Read until a condition holds; returns whether it did in that time."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            if self.socket.poll(50):
                _, number, payload = self.socket.recv_multipart()
                self.take(number, payload)
        return condition()

    def tokens(self, last: int) -> list[int]:
        """The tokens up to a block, by its chain."""
        found: list[int] = []
        node: int | None = last
        while node is not None:
            parent, tokens = self.blocks[node]
            found[:0] = tokens
            node = parent
        return found


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_consumer_knows_what_the_engine_holds(tiny_dir, tmp_path, context):
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with Engine(str(tiny_dir), dtype="float32", pool_tokens=512, kv_events=f"{events},{replay}") as engine:
        consumer = Consumer(context, events)
        while not consumer.until(lambda: bool(consumer.numbers), 0.2):  # until it has subscribed
            engine.generate([[7] * 50], {"max_new_tokens": 2})
            engine.flush_cache()
        assert consumer.until(lambda: consumer.blocks == {})
        prompt = list(range(50, 114))
        engine.generate([prompt], {"max_new_tokens": 2, "temperature": 0})
        assert consumer.until(lambda: len(consumer.blocks) == engine.state()["pages_tree"])
        assert sorted(consumer.tokens(value) for value in consumer.blocks)[-1] == prompt
        for i in range(20):
            engine.generate([[i] * 50], {"max_new_tokens": 2})
        final = list(range(200, 264))
        engine.generate([final], {"max_new_tokens": 2})
        assert consumer.until(lambda: any(tokens == tuple(final[-16:]) for _, tokens in consumer.blocks.values()))
        held = engine.state()["pages_tree"]
        assert held < 20 * 3, "some were evicted"
        assert consumer.until(lambda: len(consumer.blocks) == held)
        engine.flush_cache()
        assert consumer.until(lambda: consumer.blocks == {})

        late = Consumer(context, events)
        ask = context.socket(zmq.DEALER)
        ask.connect(replay)
        engine.generate([prompt], {"max_new_tokens": 2})
        for _ in range(2):  # the second time by an engine that has nothing to do
            ask.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert ask.poll(60_000)
                _, number, payload = ask.recv_multipart()
                if not payload:
                    break
                late.take(number, payload)
            assert int.from_bytes(number, "big", signed=True) == -1
        assert late.until(lambda: len(late.blocks) == engine.state()["pages_tree"] > 0)
        assert late.numbers == list(range(len(late.numbers))), "no event is missing"


def test_the_padding_of_a_module_is_no_token():
    publisher = EventPublisher(CacheConfig(kv_events="inproc://events", page_size=4))
    wire = publisher._wire(Stored((1, 2), None, array("i", [5, 6, 7, 8, 9, -1, -1, -1]).tobytes(), Namespace()), "GPU")
    publisher.close()
    assert (wire.token_ids, wire.block_hashes) == ([5, 6, 7, 8, 9], [1, 2])

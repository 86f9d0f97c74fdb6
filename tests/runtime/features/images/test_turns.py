"""The tower computes tiles by turns, beside the steps of the engine."""

import threading
import time

import pytest

from radix import Namespace
from runtime.features.images import states as decoder
from runtime.features.images.part import ImagesPart
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.images.prompts import NEW, answers, encode, send, tiles
from tests.runtime.features.images.seeing import picture

C = picture(4, 60, 60)


class Gate:
    """Notes of which request, and in which thread, each tile is computed; the first one waits until `open` is set."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch):
        self.part = driver.core.part(ImagesPart)
        self.order, self.threads = [], set()
        self.started, self.open = threading.Event(), threading.Event()
        compute = self.part._states.compute

        def note(key, file, tile):
            self.started.set()
            self.threads.add(threading.current_thread().name)
            requests = [(rid, one) for rid, one in driver.core.requests.items() if one.given is not None]
            self.order.append(next(rid for rid, one in requests if key in [run[1] for run in one.given._runs]))
            assert self.open.wait(60)
            return compute(key, file, tile)

        monkeypatch.setattr(self.part._states, "compute", note)

    def wait(self) -> None:
        """Until the tower's thread has nothing more to do."""
        while self.part._threads._running:
            time.sleep(0.01)


@pytest.fixture
def driver(seeing_dir):
    return Driver(make_core(seeing_dir))


def test_accounts_and_their_requests_take_turns(driver, monkeypatch, sight, seeing, encoded, expected):
    """Not even a request with many images delays the tiles of others by more than one each."""
    gate = Gate(driver, monkeypatch)
    other = encode(sight, seeing, "User:<image>And this?<end_of_utterance>\nAssistant:", [C])
    for rid, one, account in [("a", encoded[1], "first"), ("b", other, "first"), ("c", encoded[0], "second")]:
        send(driver, rid, one, account=account, namespace=Namespace(account))
    assert gate.started.wait(60)
    gate.open.set()
    gate.wait()
    assert "".join(gate.order) == "abcacbcacbc" + "ababaaa"
    driver.run()
    assert [driver.tokens["a"], driver.tokens["c"]] == [expected[1], expected[0]]


def test_an_ended_request_has_no_further_tiles_computed(driver, monkeypatch, encoded):
    gate = Gate(driver, monkeypatch)
    send(driver, "gone", encoded[0])
    assert gate.started.wait(60)
    driver.abort("gone")
    gate.open.set()
    gate.wait()
    assert tiles(driver) == 1
    assert not gate.part._states._decoded, "pixels are kept no longer than tiles of them are wanted"
    driver.run()
    assert driver.finish["gone"].type == "abort"


def test_what_is_evicted_before_admission_is_computed_beside_the_steps(driver, monkeypatch, encoded, expected):
    """All of its KV was in the tree as the request came. Meanwhile others go on."""
    assert answers(driver, encoded[:1]) == expected[:1]
    gate, cache = Gate(driver, monkeypatch), driver.core.cache
    gate.part._states.erase()
    send(driver, "reads", encoded[4])
    send(driver, "sees", encoded[0])
    assert not driver.core.scheduler.num_blocked
    cache.allocator.release(cache.tree.evict(cache.tree.num_evictable_pages))
    while len(driver.tokens.get("reads", ())) < NEW:  # while the tower waits
        driver.step()
    assert driver.core.scheduler.num_blocked == 1
    gate.open.set()
    driver.run()
    assert [driver.tokens["reads"], driver.tokens["sees"]] == [expected[4], expected[0]]
    assert all(name.startswith("ramet-images") for name in gate.threads)


def test_what_is_computed_while_it_is_erased_is_not_kept(driver, monkeypatch, encoded):
    part = driver.core.part(ImagesPart)
    decode = decoder.PROCESSES.decode

    def erase(order):
        part._states.erase()
        return decode(order)

    monkeypatch.setattr(decoder.PROCESSES, "decode", erase)
    answers(driver, encoded[:1])
    assert not part._states._kept
    assert not part._states._decoded

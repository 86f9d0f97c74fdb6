"""Blocks in a real Redis or Valkey server, which dies, hangs, fills up and asks for passwords."""

import subprocess
import time
from contextlib import closing

import pytest

from loadgen.http.local_server import free_port
from runtime.errors import ModelError
from runtime.features.tiers.opening import open_shared
from runtime.features.tiers.tier import Tier
from tests.redis_server import PROGRAM, running_redis
from tests.relay import Relay
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.tiers.conftest import FORM, blocks_of, payload_of, put_block, stored
from tests.runtime.features.tiers.engines import draw, evict, loaded, open_core

pytest.importorskip("redis")
if PROGRAM is None:
    pytest.skip("neither valkey-server nor redis-server is installed", allow_module_level=True)

from runtime.features.tiers.redis import RedisStore

# Of good answers, also on a busy machine.
LIMIT_S = 60
ALICE, BOB = blocks_of("alice", 4), blocks_of("bob", 2)


@pytest.fixture(scope="module")
def server():
    with running_redis() as server:
        yield server


@pytest.fixture
def store(server):
    store = RedisStore(server.url, LIMIT_S)
    store._redis.flushall()
    yield store
    store.close()


def test_other_programs_keys_stay(store):
    store._redis.set(b"somebody's", b"value")
    for block in ALICE + BOB:
        assert put_block(store, block)
    assert store.usage().blocks == 7
    assert store.usage().capacity is None
    assert store.erase(None) == 6
    assert store._redis.get(b"somebody's") == b"value"


def test_an_erasure_passes_through_more_than_one_batch(store):
    blocks = blocks_of("alice", 1200)
    for block in blocks + BOB:
        put_block(store, block)
    assert store.erase("alice") == 1200
    assert store.usage().blocks == 2


def test_an_engine_its_next_start_and_another_replica(ids_dir, store, server):
    prompts = [draw(0, 150) + draw(i, 60) for i in range(3)]
    expected = Driver(make_core(ids_dir, prefix_cache=False, kernels="torch")).together(prompts, max_new_tokens=4)
    first, second = (open_core(ids_dir, kv_store=server.url) for _ in range(2))
    driver = Driver(first)
    assert driver.together(prompts, max_new_tokens=4) == expected
    evict(first)
    assert driver.together(prompts[:1], max_new_tokens=4) == expected[:1]
    assert loaded(driver, "r3") == {"store": 192}
    first.close()
    for core in (second, open_core(ids_dir, kv_store=server.url)):
        driver = Driver(core)
        assert driver.together(prompts, max_new_tokens=4) == expected
        assert loaded(driver, "r0") == {"store": 192}
        core.close()
    assert store.usage().blocks >= 5


def test_a_full_server_has_no_room(tmp_path):
    with running_redis("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        store = RedisStore(server.url, LIMIT_S)
        done = [store.put(i.to_bytes(16, "big"), [bytes(500_000)], "") for i in range(10)]
        assert done[0]
        assert not done[-1]
        assert store.usage().capacity == 4 << 20
        assert store.get(bytes(16)) is not None
        store.close()


def test_a_server_that_dies_and_comes_back():
    with running_redis() as server:
        tier = Tier(RedisStore(server.url, LIMIT_S))
        tier.put(ALICE[0], stored(ALICE[0]))
        assert tier.get(ALICE[0]) is not None
    assert tier.get(ALICE[0]) is None
    assert not tier.is_open
    with running_redis(port=server.port):
        until = time.monotonic() + 60
        while not tier.is_open and time.monotonic() < until:
            time.sleep(0.05)
        tier.put(ALICE[0], stored(ALICE[0]))
        assert tier.get(ALICE[0]) is not None
    tier.close()


def test_a_server_that_hangs_is_a_failure_after_the_time_limit(server):
    with Relay(server.port) as way:
        address = f"redis://127.0.0.1:{way.port}/0"
        with closing(RedisStore(address, LIMIT_S)) as patient, closing(RedisStore(address, 0.1)) as store:
            assert put_block(patient, ALICE[0])
            way.bytes_per_s = 0
            for call in (
                lambda: store.get(ALICE[0].key),
                lambda: store.contains_many([ALICE[0].key]),
                lambda: put_block(store, ALICE[1]),
                lambda: store.erase("alice"),
                store.usage,
            ):
                with pytest.raises(OSError, match=r"[Tt]imeout"):
                    call()
            way.bytes_per_s = None
            assert FORM.decode(patient.get(ALICE[0].key), ALICE[0]) == payload_of(ALICE[0])


def test_passwords_and_tls(tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *name]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    user = ["--user", "ramet", "on", ">secret", "~ramet:*", "+@all", "-@admin", "--user", "default", "off"]
    tls = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no"]
    tls_port = free_port()
    with running_redis(*user, *map(str, tls), "--tls-port", str(tls_port)) as plain:
        authority = f"ssl_ca_certs={certificate}"
        for address in (f"redis://ramet:secret@127.0.0.1:{plain.port}", f"rediss://ramet:secret@127.0.0.1:{tls_port}"):
            store = RedisStore(f"{address}/0?{authority if address.startswith('rediss') else ''}", LIMIT_S)
            assert put_block(store, ALICE[0])
            assert FORM.decode(store.get(ALICE[0].key), ALICE[0]) == payload_of(ALICE[0])
            assert store.erase("alice") == 1
            store.close()
        for address, words in (
            (f"redis://ramet:guess@127.0.0.1:{plain.port}/0", "invalid username-password"),
            (f"redis://127.0.0.1:{plain.port}/0", "authenticated"),
            (f"rediss://ramet:guess@127.0.0.1:{tls_port}/0", "CERTIFICATE_VERIFY_FAILED"),
        ):
            store = RedisStore(address, LIMIT_S)
            with pytest.raises(OSError, match=words) as error:
                put_block(store, ALICE[0])
            assert "guess" not in str(error.value)
            store.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("redis://host:port", "--kv-store: .*port"),
        ("redis://host/0?socket_timeout=long", "--kv-store: .*socket_timeout"),
    ],
)
def test_an_address_that_cannot_be_understood(address, words):
    with pytest.raises(ModelError, match=words):
        open_shared(address)

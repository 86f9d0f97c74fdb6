"""Keys by tenant: whoever lacks the salt reads nothing."""

import stat
import threading

import pytest

from radix import Namespace
from runtime.errors import ModelError
from runtime.features.tiers.block import Format, Mismatch, read_block
from runtime.features.tiers.opening import open_cipher
from runtime.features.tiers.worker import TierWorker
from tests.runtime.features.tiers.conftest import FORM, FlakyStore, payload_of

pytest.importorskip("cryptography")

from runtime.features.tiers.crypt import KeyFile


@pytest.fixture
def path(tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 31 + b"e\n")
    return tmp_path / "key"


def sealed(form: Format, tenant: str = "alice"):
    block = next(form.chain(Namespace(tenant), bytes(range(64)), 64))
    return block, b"".join(form.encode(block, payload_of(block)))


def test_a_block_comes_back_and_says_nothing_to_others(path):
    form = Format(FORM.fingerprint, open_cipher(path))
    block, stored = sealed(form)
    assert form.decode(stored, block) == payload_of(block)
    assert read_block(stored).num_bytes == len(stored)
    assert block.tokens not in stored
    assert block.key * 2 not in stored
    assert sealed(form)[1] != stored, "a nonce is used once"
    # Another start, another process.
    assert Format(FORM.fingerprint, KeyFile(path)).decode(stored, block) == payload_of(block)
    assert stat.S_IMODE((path.parent / "key.salts").stat().st_mode) == 0o600


def test_a_changed_byte_is_a_mismatch_even_under_a_right_checksum(path):
    form = Format(FORM.fingerprint, KeyFile(path))
    block, stored = sealed(form)
    for at in (0, 12, 100, len(stored) - 200):
        body = bytearray(stored[-(len(stored) - 93) :])
        body[at] ^= 1
        forged = b"".join([stored[:72], _checksum(stored[:72], stored[88:93], body), stored[88:93], body])
        assert not isinstance(read_block(forged), Mismatch)
        assert form.decode(forged, block) is Mismatch.CIPHER


def _checksum(*parts):
    from xxhash import xxh3_128

    return xxh3_128(b"".join(parts)).digest()


def test_a_block_of_another_tenant_key_or_salt_is_a_mismatch(path, tmp_path):
    form = Format(FORM.fingerprint, KeyFile(path))
    block, stored = sealed(form)
    sealed(form, "bob")
    cipher = form.cipher
    body = memoryview(cipher.seal("alice", b"text", b"bound"))
    assert cipher.open("alice", body, b"bound") == b"text"
    for tenant, bound in (("bob", b"bound"), ("nobody", b"bound"), ("alice", b"other")):
        assert cipher.open(tenant, body, bound) is None
    assert cipher.open("alice", body[:5], b"bound") is None
    (tmp_path / "other").write_bytes(b"o" * 32)
    (tmp_path / "other.salts").write_bytes((tmp_path / "key.salts").read_bytes())
    other = Format(FORM.fingerprint, KeyFile(tmp_path / "other"))
    assert other.decode(stored, block) is not None
    assert isinstance(other.decode(stored, block), Mismatch)
    assert other.cipher.open("alice", body, b"bound") is None


def test_processes_with_other_salts_have_other_names_for_their_blocks(path, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "key").write_bytes(path.read_bytes())
    here, there = KeyFile(path), KeyFile(tmp_path / "there" / "key")
    assert here.name_secret != there.name_secret
    assert here.name_secret == KeyFile(path).name_secret
    assert len(here.name_secret) == 32


def test_an_erased_tenant_can_never_be_read_again(path):
    here, there = (Format(FORM.fingerprint, KeyFile(path)) for _ in range(2))
    block, stored = sealed(here)
    of_bob, stored_of_bob = sealed(here, "bob")
    assert there.decode(stored, block) == payload_of(block)
    assert here.cipher.erase("alice") == 1
    assert here.cipher.erase("alice") == 0
    for form in (here, there, Format(FORM.fingerprint, KeyFile(path))):
        assert form.decode(stored, block) is Mismatch.CIPHER
        assert form.decode(stored_of_bob, of_bob) == payload_of(of_bob)
    again, stored_again = sealed(here)
    assert again.key == block.key
    assert there.decode(stored_again, again) == payload_of(again)
    assert there.decode(stored, block) is Mismatch.CIPHER
    assert here.cipher.erase(None) == 2
    assert there.decode(stored_of_bob, of_bob) is Mismatch.CIPHER
    assert KeyFile(path).name_secret == here.cipher.name_secret


def test_tenants_that_come_at_once_keep_their_salts(path):
    files = [KeyFile(path) for _ in range(2)]
    bodies = {}

    def seal(number):
        bodies[number] = memoryview(files[number % 2].seal(f"tenant {number}", b"text", b""))

    threads = [threading.Thread(target=seal, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, body in bodies.items():
        assert files[0].open(f"tenant {number}", body, b"") == b"text"
    assert files[1].erase(None) == 8


def test_a_tenant_may_have_any_name(path):
    cipher = KeyFile(path)
    for tenant in ("", "names", "tenant:", "\ud800"):
        assert cipher.open(tenant, memoryview(cipher.seal(tenant, b"text", b"")), b"") == b"text"
        assert cipher.erase(tenant) == 1


@pytest.mark.parametrize(
    ("content", "salts", "words"),
    [
        (None, None, "cannot be read: No such file"),
        (b"short", None, "has 5 bytes; a key has 32 or more"),
        (b"k" * 32, b"{rubbish", "salts cannot be kept beside it: .* is damaged"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_an_error(tmp_path, content, salts, words):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    if salts is not None:
        (tmp_path / "key.salts").write_bytes(salts)
    with pytest.raises(ModelError, match=words):
        KeyFile(tmp_path / "key")


def test_salts_that_vanish_are_a_mismatch(path):
    form = Format(FORM.fingerprint, KeyFile(path))
    block, stored = sealed(form)
    salts = path.with_name("key.salts")
    for damage in (lambda: salts.write_text("[1]"), lambda: salts.write_text("{"), salts.unlink):
        damage()
        assert form.decode(stored, block) is Mismatch.CIPHER


def test_a_block_that_cannot_be_encrypted_is_not_written(path):
    form = Format(FORM.fingerprint, KeyFile(path))
    block, _ = sealed(form)
    path.with_name("key.salts").write_text("{")
    store = FlakyStore()
    worker = TierWorker(form, [store])
    assert worker.write(block, lambda: payload_of(block), 1)
    closed = []
    store.close = lambda: closed.append(store.usage().blocks)
    worker.close(60)
    assert closed == [0]
    assert dict(worker._tiers["disk"].counts) == {"failed": 1}

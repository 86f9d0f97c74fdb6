"""The form of a stored block: whatever is changed in it, it is not believed."""

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix import Namespace
from runtime.features.tiers.block import ROOT, Fingerprint, Format, Head, Mismatch, TierBlock, read_block, read_head

FINGERPRINT = Fingerprint("weights", "bfloat16", "KV", 16, "theta 1e4", "0/1", "causal")
FORMAT = Format(FINGERPRINT.digest())
PAYLOAD = np.arange(2000, dtype=np.uint16)


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


def block_of(
    namespace: Namespace = Namespace("alice"), ids: bytes = tokens(1, 2, 3, 4), form: Format = FORMAT
) -> TierBlock:
    return TierBlock(form.key(ROOT, namespace, ids), namespace, ids)


BLOCK = block_of()
STORED = b"".join(FORMAT.encode(BLOCK, memoryview(PAYLOAD)))


def test_a_block_comes_back():
    payload = FORMAT.decode(STORED, BLOCK)
    assert bytes(payload) == PAYLOAD.tobytes()
    head = read_block(STORED)
    assert isinstance(head, Head)
    assert (head.key, head.tenant, head.num_bytes, head.sealed) == (BLOCK.key, "alice", len(STORED), False)


def test_the_payload_is_not_copied():
    parts = FORMAT.encode(BLOCK, PAYLOAD.data)
    assert np.shares_memory(np.frombuffer(parts[-1], np.uint8), PAYLOAD)
    assert np.shares_memory(np.frombuffer(FORMAT.decode(STORED, BLOCK), np.uint8), np.frombuffer(STORED, np.uint8))


def test_a_changed_bit_is_a_mismatch():
    begin = len(STORED) - PAYLOAD.nbytes
    for at in [*range(begin), *range(begin, len(STORED), 97), len(STORED) - 1]:
        for bit in (0, 7):
            changed = bytearray(STORED)
            changed[at] ^= 1 << bit
            assert isinstance(FORMAT.decode(changed, BLOCK), Mismatch), at
            assert isinstance(read_block(changed), Mismatch), at


def test_a_missing_or_an_added_byte_is_a_mismatch():
    begin = len(STORED) - PAYLOAD.nbytes
    for length in [*range(begin + 2), *range(begin, len(STORED), 97), len(STORED) - 1]:
        assert FORMAT.decode(STORED[:length], BLOCK) is Mismatch.TRUNCATED
    assert FORMAT.decode(STORED + b"\0", BLOCK) is Mismatch.TRUNCATED


@given(st.binary(max_size=300))
def test_rubbish_is_a_mismatch(data):
    assert isinstance(FORMAT.decode(data, BLOCK), Mismatch)
    assert isinstance(FORMAT.decode(STORED[:8] + data, BLOCK), Mismatch)


def test_a_length_that_nobody_writes_is_refused_from_the_head():
    huge = bytearray(STORED)
    struct.pack_into("<Q", huge, 16, 1 << 40)
    assert read_head(huge) is Mismatch.FORMAT


@pytest.mark.parametrize("name", Fingerprint._fields)
def test_a_block_of_another_model_or_layout_is_a_mismatch(name):
    value = getattr(FINGERPRINT, name)
    other = Format(FINGERPRINT._replace(**{name: value + 1 if name == "page_size" else value + "x"}).digest())
    assert other.key(ROOT, BLOCK.namespace, BLOCK.tokens) != BLOCK.key
    # Even where somebody renames it.
    assert other.decode(STORED, BLOCK) is Mismatch.FINGERPRINT


def test_fields_of_a_fingerprint_do_not_run_into_each_other():
    assert (
        FINGERPRINT._replace(weights="ab", dtype="c").digest() != FINGERPRINT._replace(weights="a", dtype="bc").digest()
    )


def test_what_a_tower_sees_is_part_of_the_keys_of_images_alone():
    one, other = (Format(FINGERPRINT.digest(), sight=sight) for sight in (b"one", b"other"))
    for padded in (tokens(1, 2, -1, -1), tokens(1, 2, -2, -2)):
        assert one.key(ROOT, Namespace(), padded) == other.key(ROOT, Namespace(), padded)
    image = tokens(1, 2, -3, 4)
    assert one.key(ROOT, Namespace(), image) != other.key(ROOT, Namespace(), image)


def test_another_key_namespace_or_other_tokens_are_a_mismatch():
    assert FORMAT.decode(STORED, BLOCK._replace(key=bytes(16))) is Mismatch.KEY
    for other in (Namespace("bob"), Namespace("alice", "salt"), Namespace("alice", "", "module:1"), Namespace()):
        assert FORMAT.decode(STORED, BLOCK._replace(namespace=other)) is Mismatch.NAMESPACE
        assert block_of(other).key != BLOCK.key
    for other in (tokens(1, 2, 3, 5), tokens(1, 2, 3), tokens(1, 2, 3, 4, 5), b""):
        assert FORMAT.decode(STORED, BLOCK._replace(tokens=other)) is Mismatch.TOKENS
        assert block_of(ids=other).key != BLOCK.key


def test_a_key_names_all_tokens_before_it():
    space = Namespace("alice")
    chain = list(FORMAT.chain(space, tokens(*range(10)), 16))
    assert [block.tokens for block in chain] == [tokens(0, 1, 2, 3), tokens(4, 5, 6, 7)]
    other = list(FORMAT.chain(space, tokens(9, *range(1, 10)), 16))
    assert other[1].tokens == chain[1].tokens
    assert other[1].key != chain[1].key
    assert list(FORMAT.chain(space, tokens(4, 5, 6, 7), 16, chain[0].key)) == chain[1:]
    assert list(FORMAT.chain(space, tokens(1, 2, 3), 16)) == []


def test_a_tenant_of_any_name():
    for name in ("", "Ä" * 3000, "\ud800"):
        block = block_of(Namespace(name))
        stored = b"".join(FORMAT.encode(block, b"kv"))
        assert FORMAT.decode(stored, block) == b"kv"
        assert read_block(stored).tenant == name


@dataclasses.dataclass
class Shift:
    """No secret at all: shows where a cipher is called, and with what."""

    name_secret = b"n" * 32

    def seal(self, tenant, data, bound):
        return b"N" * 12 + bytes(data)[::-1] + b"T" * 16

    def open(self, tenant, data, bound):
        return bytes(data[12:-16])[::-1]

    def erase(self, tenant):
        return 0


def test_a_block_without_encryption_is_not_believed_where_there_is_a_key():
    secret = Format(FORMAT.fingerprint, Shift())
    block = block_of(form=secret)
    assert block.key != BLOCK.key
    sealed, plain = (b"".join(secret.encode(block, b"kv", sealed=sealed)) for sealed in (True, False))
    assert secret.decode(sealed, block) == b"kv"
    assert secret.decode(plain, block, sealed=False) == b"kv"
    assert secret.decode(plain, block) is Mismatch.CIPHER
    assert secret.decode(sealed, block, sealed=False) is Mismatch.CIPHER
    assert block.tokens not in sealed
    assert read_block(sealed).sealed

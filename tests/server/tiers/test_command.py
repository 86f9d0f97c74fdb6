"""`ramet cache` on real directories."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import time

import pytest

from radix import Namespace
from runtime.kv.tiers.block import Fingerprint, Format
from runtime.kv.tiers.disk import DiskStore
from runtime.kv.tiers.files import DirectoryStore
from runtime.kv.tiers.store import Limits
from server.cli import main

FORM = Format(Fingerprint("weights", "float32", "KV", 16, "rope").digest())
LIMITS = Limits(1 << 30)


def blocks_of(tenant: str, number: int = 4):
    return list(FORM.chain(Namespace(tenant), bytes(range(64 * number)), 64))


def put(store, block):
    payload = bytes(100_000)
    assert store.put(block.key, FORM.encode(block, payload), block.namespace.tenant, "evicted")


@pytest.fixture(params=["disk", "shared"])
def directory(request, tmp_path, monkeypatch):
    """Four blocks of alice, two of nobody, of growing age."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cache"
    now = time.time()
    ages = iter([9, 8, 7, 3, 2, 1])
    blocks = blocks_of("alice") + blocks_of("", 2)
    if request.param == "disk":
        store = DiskStore(path, LIMITS, clock=lambda: now - 86400 * next(ages))
        for block in blocks:
            put(store, block)
        store._clock = time.time
    else:
        store = DirectoryStore(path)
        for block in blocks:
            put(store, block)
            used = now - 86400 * next(ages)
            os.utime(store._files.path(block.key), (used, used))
    store.close()
    return path


def keys(directory):
    return {entry.key for entry in DirectoryStore(directory).entries()}


def cells(text):
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]


def test_ls(directory, capsys):
    assert main(["cache", "ls", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "6 blocks, 0.6 MiB" in text
    nobody, alice = cells(text)
    assert nobody == ["(nobody)", "2", "0.2 MiB", "0", "2 days ago", "24 hours ago"]
    assert alice == ["alice", "4", "0.4 MiB", "0", "9 days ago", "3 days ago"]
    assert main(["cache", "ls", str(directory), "--tenant", "alice", "--blocks"]) == 0
    rows = cells(capsys.readouterr().out)
    assert sorted(row[0] for row in rows) == sorted(block.key.hex() for block in blocks_of("alice"))
    reason = "evicted" if (directory / "index.sqlite").exists() else "found"
    assert all(row[1:5] == ["alice", reason, "0.1 MiB", "0"] for row in rows)


def test_verify(directory, capsys):
    assert main(["cache", "verify", str(directory)]) == 0
    assert cells(capsys.readouterr().out) == [["whole", "6"]]
    files = DirectoryStore(directory)._files
    flipped, cut, other, _ = (files.path(block.key) for block in blocks_of("alice"))
    data = bytearray(flipped.read_bytes())
    data[5000] ^= 1
    flipped.write_bytes(data)
    os.truncate(cut, 50_000)
    other.write_bytes(files.path(blocks_of("")[0].key).read_bytes())
    assert main(["cache", "verify", str(directory)]) == 1
    found = dict(cells(capsys.readouterr().out))
    assert found == {"whole": "3", "checksum": "1", "truncated": "1", "key": "1"}
    assert main(["cache", "verify", str(directory), "--delete"]) == 0
    capsys.readouterr()
    assert main(["cache", "verify", str(directory)]) == 0
    assert cells(capsys.readouterr().out) == [["whole", "3"]]
    assert keys(directory) == {block.key for block in [blocks_of("alice")[3], *blocks_of("", 2)]}


@pytest.mark.parametrize(
    ("options", "words", "left"),
    [
        (["--all"], "6 blocks deleted", []),
        (["--tenant", "alice"], "4 blocks deleted", [4, 5]),
        (["--tenant", ""], "2 blocks deleted", [0, 1, 2, 3]),
        (["--tenant", "bob"], "0 blocks deleted", [0, 1, 2, 3, 4, 5]),
        (["--unused", "2.5"], "4 blocks deleted, 0.4 MiB", [4, 5]),
        (["--to", "0.0003"], "3 blocks deleted, 0.3 MiB", [3, 4, 5]),
        (["--to", "1"], "0 blocks deleted", [0, 1, 2, 3, 4, 5]),
        (["--to", "0"], "6 blocks deleted", []),
    ],
)
def test_purge(directory, capsys, options, words, left):
    assert main(["cache", "purge", str(directory), *options]) == 0
    assert words in capsys.readouterr().out
    blocks = blocks_of("alice") + blocks_of("", 2)
    assert keys(directory) == {blocks[number].key for number in left}


def test_export_and_import(directory, tmp_path, capsys):
    assert main(["cache", "export", str(directory), "all.tar"]) == 0
    assert main(["cache", "export", str(directory), "alice.tar", "--tenant", "alice"]) == 0
    assert capsys.readouterr().err.splitlines()[-2:] == ["6 blocks exported", "4 blocks exported"]
    assert stat.S_IMODE(os.stat("all.tar").st_mode) == 0o600
    there = tmp_path / "there"
    assert main(["cache", "import", str(there), "alice.tar"]) == 0
    assert keys(there) == {block.key for block in blocks_of("alice")}
    # A server takes it over, the least recently used first.
    DiskStore(there, LIMITS).close()
    assert main(["cache", "import", str(there), "all.tar"]) == 0
    assert "6 blocks imported" in capsys.readouterr().out
    store = DiskStore(there, LIMITS)
    assert [entry.key for entry in store.entries()] == [b.key for b in blocks_of("alice") + blocks_of("", 2)]
    for block in blocks_of("alice"):
        assert FORM.decode(store.get(block.key), block) == bytes(100_000)


def test_an_archive_of_other_things_brings_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = b"".join(FORM.encode(blocks_of("alice")[0], b"kv"))
    with tarfile.open("mixed.tar", "w") as archive:
        for name, data in (("../../outside.kv", good), ("bad.kv", good[:-1]), ("/etc/note", b"note")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.kv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert main(["cache", "import", "cache", "mixed.tar"]) == 1
    assert "1 blocks imported; 3 members are no blocks" in capsys.readouterr().out
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.stem for path in files] == [blocks_of("alice")[0].key.hex()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "nowhere"], "nowhere is no directory"),
        (["ls", "."], "ramet cache: . holds other things than blocks"),
        (["export", "empty", "none/file"], "export: [Errno 2] No such file"),
        (["import", "cache", "nothing.tar"], "import: [Errno 2] No such file"),
        (["import", "cache", "rubbish.tar"], "import: "),
        (["ls", "rubbish.tar"], "rubbish.tar is no directory"),
    ],
)
def test_an_error_is_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubbish.tar").write_bytes(b"rubbish" * 1000)
    (tmp_path / "empty").mkdir()
    assert main(["cache", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ramet: {words}")


@pytest.mark.parametrize(
    "options", [[], ["--all", "--tenant", "alice"], ["--to", "-1"], ["--to", "nan"], ["--unused", "x"]]
)
def test_a_purge_has_to_say_what(tmp_path, options):
    with pytest.raises(SystemExit) as end:
        main(["cache", "purge", str(tmp_path), *options])
    assert end.value.code == 2

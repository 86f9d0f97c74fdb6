"""`ramet cache` on real directories."""

import time

import pytest

from radix import Namespace
from runtime.features.tiers.block import Fingerprint, Format
from runtime.features.tiers.files import FileStore
from server.auth.keys import read_keys
from server.cli import main

FORM = Format(Fingerprint("weights", "float32", "KV", 16, "rope").digest())


def blocks_of(tenant: str, number: int = 4):
    return list(FORM.chain(Namespace(tenant), bytes(range(64 * number)), 64))


@pytest.fixture(params=["disk", "shared"])
def directory(request, tmp_path, monkeypatch):
    """Four blocks of alice, two of nobody, of growing age."""
    monkeypatch.chdir(tmp_path)
    now, ages = time.time(), iter([9, 8, 7, 3, 2, 1])
    bounds = [1 << 30] if request.param == "disk" else []
    store = FileStore(tmp_path / "cache", "", *bounds, clock=lambda: now - 86400 * next(ages))
    for block in blocks_of("alice") + blocks_of("", 2):
        assert store.put(block.key, FORM.encode(block, bytes(100_000)), block.namespace.tenant)
    return store.directory


def keys(directory):
    return set(FileStore(directory, "").keys())


def cells(text):
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]


def test_ls(directory, capsys):
    assert main(["cache", "ls", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "6 blocks, 0.6 MiB" in text
    nobody, alice = cells(text)
    assert nobody == ["(nobody)", "2", "0.2 MiB", "2 days ago", "24 hours ago"]
    assert alice == ["alice", "4", "0.4 MiB", "9 days ago", "3 days ago"]


def test_tenants_have_the_names_of_the_key_file(tmp_path, capsys):
    path, directory = tmp_path / "keys", tmp_path / "cache"
    path.write_text("carol sk-0123456789\n")
    (carol,) = read_keys(path)
    store = FileStore(directory, "", 1 << 30)
    for block in blocks_of(carol.account):
        store.put(block.key, FORM.encode(block, bytes(1000)), carol.account)
    assert main(["cache", "ls", str(directory), "--api-keys", str(path)]) == 0
    assert [row[:2] for row in cells(capsys.readouterr().out)] == [["carol", "4"]]
    assert main(["cache", "purge", str(directory), "--api-keys", str(path), "--tenant", "carol"]) == 0
    assert not keys(directory)


@pytest.mark.parametrize(
    ("options", "words", "left"),
    [
        (["--all"], "6 blocks deleted", []),
        (["--tenant", "alice"], "4 blocks deleted", [4, 5]),
        (["--tenant", ""], "2 blocks deleted", [0, 1, 2, 3]),
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


def test_a_tenant_without_blocks_is_an_error(directory, capsys):
    assert main(["cache", "purge", str(directory), "--tenant", "bob"]) == 1
    hint = "--api-keys FILE gives names to tenants"
    assert capsys.readouterr().err == f"ramet: no blocks of a tenant 'bob' in {directory}; {hint}\n"
    assert len(keys(directory)) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "nowhere"], "nowhere is no directory"),
        (["ls", "."], "ramet cache: . holds other things than blocks"),
        (["ls", "file"], "file is no directory"),
    ],
)
def test_an_error_is_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
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

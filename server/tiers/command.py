"""`ramet cache`: looks at a disk cache, checks it, makes room in it, and carries it elsewhere."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from runtime.errors import RametError
from runtime.kv.tiers.block import MOST_BYTES, Mismatch, read_block
from runtime.kv.tiers.disk import DiskStore
from runtime.kv.tiers.files import NOTES, BlockFiles, DirectoryStore
from runtime.kv.tiers.store import BlockStore, Entry, Limits
from runtime.logs import one_line

_GIB = 1 << 30
_DAY_S = 86400.0
_UNBOUNDED = Limits(1 << 62)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (help_text, _) in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        action.add_argument("directory", type=Path, metavar="DIR", help="of --disk-cache, or of --kv-store dir:DIR")
        if name in ("ls", "export"):
            action.add_argument("--tenant", help="blocks of this tenant alone")
        if name == "ls":
            action.add_argument("--blocks", action="store_true", help="a row for each block")
        if name == "verify":
            action.add_argument("--delete", action="store_true", help="delete files that are no whole blocks")
        if name == "purge":
            _add_choices(action)
        if name in ("export", "import"):
            action.add_argument("file", metavar="FILE", help="a tar archive; - is standard output or input")


def _add_choices(action: argparse.ArgumentParser) -> None:
    choice = action.add_mutually_exclusive_group(required=True)
    choice.add_argument("--all", action="store_true", help="everything")
    choice.add_argument("--tenant", help="blocks of this tenant")
    choice.add_argument("--unused", type=_positive, metavar="DAYS", help="blocks that were not used for so long")
    choice.add_argument("--to", type=_positive, metavar="GIB", help="the least recently used, until so much is left")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked; 1 if `verify` or `import` found what is no block, else 0."""
    directory: Path = arguments.directory
    if arguments.action != "import" and not directory.is_dir():
        raise RametError(f"{directory} is no directory")
    with closing(_open(directory)) as store:
        try:
            return _ACTIONS[arguments.action][1](store, arguments)
        except (OSError, tarfile.TarError) as error:
            raise RametError(f"{arguments.action}: {error}") from None


def _open(directory: Path) -> BlockStore:
    """A directory that has an index is a server's own; another one is shared, and gets none here."""
    if (directory / "index.sqlite").exists():
        return DiskStore(directory, _UNBOUNDED, "ramet cache")
    return DirectoryStore(directory, "ramet cache")


def _list(store: BlockStore, arguments: argparse.Namespace) -> int:
    entries = [entry for entry in store.entries() if arguments.tenant in (None, entry.tenant)]
    table = Table(title=f"{len(entries):,} blocks, {_size(entries)}")
    if arguments.blocks:
        _columns(table, ("block", "tenant", "reason"), ("size", "hits", "last use"))
        for entry in reversed(entries):
            figures = (_size([entry]), f"{entry.hits:,}", _ago(entry.used))
            table.add_row(entry.key.hex(), _shown(entry.tenant), entry.reason, *figures)
    else:
        _columns(table, ("tenant",), ("blocks", "size", "hits", "first use", "last use"))
        tenants: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            tenants[entry.tenant].append(entry)
        for tenant, own in sorted(tenants.items()):
            uses = [entry.used for entry in own]
            hits = sum(entry.hits for entry in own)
            table.add_row(_shown(tenant), f"{len(own):,}", _size(own), f"{hits:,}", _ago(min(uses)), _ago(max(uses)))
    _console().print(table)
    return 0


def _verify(store: BlockStore, arguments: argparse.Namespace) -> int:
    files = BlockFiles(arguments.directory, "ramet cache")
    found, size, damaged = Counter[str](), 0, []
    for key in tqdm(list(files.keys()), desc="verify", unit="block", disable=None):
        data = files.read(key)
        if data is None:  # evicted meanwhile
            continue
        head = read_block(data)
        if not isinstance(head, Mismatch) and head.key != key:
            head = Mismatch.KEY
        if isinstance(head, Mismatch):
            damaged.append(key)
        size += len(data)
        found[head if isinstance(head, Mismatch) else "whole, encrypted" if head.sealed else "whole"] += 1
    table = Table(title=f"{size / _GIB:.2f} GiB read")
    _columns(table, ("state",), ("blocks",))
    for state, number in found.most_common():
        table.add_row(state, f"{number:,}")
    _console().print(table)
    if arguments.delete:
        store.delete(damaged)
    return int(bool(damaged) and not arguments.delete)


def _purge(store: BlockStore, arguments: argparse.Namespace) -> int:
    if arguments.all or arguments.tenant is not None:
        for note in arguments.directory.glob(f"{NOTES}*"):  # it may name the beginnings of the tenant's prompts
            note.unlink()
        print(f"{store.erase(arguments.tenant):,} blocks deleted")
        return 0
    entries = sorted(store.entries(), key=lambda entry: entry.used)
    if arguments.unused is not None:
        gone = [entry for entry in entries if entry.used < time.time() - arguments.unused * _DAY_S]
    else:
        excess = sum(entry.size for entry in entries) - arguments.to * _GIB
        gone = list(_first(entries, excess))
    store.delete([entry.key for entry in gone])
    print(f"{len(gone):,} blocks deleted, {_size(gone)}")
    return 0


def _first(entries: Iterable[Entry], excess: float) -> Iterator[Entry]:
    """The first entries that have `excess` bytes together."""
    for entry in entries:
        if excess <= 0:
            return
        yield entry
        excess -= entry.size


def _export(store: BlockStore, arguments: argparse.Namespace) -> int:
    entries = sorted(store.entries(), key=lambda entry: entry.used)
    number = 0
    with _opened(arguments.file, "wb") as file, tarfile.open(fileobj=file, mode="w|") as archive:
        for entry in tqdm(entries, desc="export", unit="block", disable=None):
            if arguments.tenant in (None, entry.tenant) and (data := store.get(entry.key)) is not None:
                member = tarfile.TarInfo(f"{entry.key.hex()}.kv")
                member.size, member.mode, member.mtime = memoryview(data).nbytes, 0o600, entry.used
                archive.addfile(member, io.BytesIO(data))
                number += 1
    print(f"{number:,} blocks exported", file=sys.stderr)
    return 0


def _import(store: BlockStore, arguments: argparse.Namespace) -> int:
    """Names in the archive are not looked at: a block says itself whose it is."""
    number, damaged = 0, 0
    with _opened(arguments.file, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in tqdm(archive, desc="import", unit="block", disable=None):
            content = archive.extractfile(member) if member.isfile() and member.size <= MOST_BYTES else None
            data = content.read() if content else b""
            head = read_block(data)
            if isinstance(head, Mismatch):
                damaged += 1
                continue
            store.put(head.key, [data], head.tenant, "imported")
            number += 1
    print(f"{number:,} blocks imported" + (f"; {damaged:,} members are no blocks" if damaged else ""))
    return int(damaged > 0)


@contextmanager
def _opened(name: str, mode: str) -> Iterator[IO[bytes]]:
    """A file that nobody else may read, for the text of prompts can be had from it; or a standard stream."""
    if name == "-":
        yield sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
        return
    flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(name, flags | os.O_CLOEXEC, 0o600), mode) as file:
        yield file


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _columns(table: Table, names: Iterable[str], figures: Iterable[str]) -> None:
    for name in names:
        table.add_column(name)
    for figure in figures:
        table.add_column(figure, justify="right")


def _size(entries: Iterable[Entry]) -> str:
    return f"{sum(entry.size for entry in entries) / (1 << 20):,.1f} MiB"


def _shown(tenant: str) -> str:
    return one_line(tenant) or "(nobody)"


def _ago(used: float) -> str:
    seconds = max(time.time() - used, 0.0)
    for unit, length in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"


_ACTIONS = {
    "ls": ("list tenants, or blocks, and their last use", _list),
    "verify": ("read all files, and check that they are whole", _verify),
    "purge": ("delete blocks", _purge),
    "export": ("write blocks to an archive", _export),
    "import": ("add the blocks of an archive", _import),
}

"""`ramet cache`: lists, checks and purges a directory of blocks."""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from runtime.errors import RametError
from runtime.kv.tiers.block import Mismatch, read_block
from runtime.kv.tiers.files import NOTES, FileStore
from runtime.kv.tiers.store import StoredBlock
from runtime.logs import one_line

_GIB = 1 << 30
_DAY_S = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (help_text, _) in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        action.add_argument("directory", type=Path, metavar="DIR", help="of --disk-cache, or of --kv-store dir:DIR")
        if name == "ls":
            action.add_argument("--tenant", help="only blocks of this tenant")
            action.add_argument("--blocks", action="store_true", help="a row for each block")
        if name == "verify":
            action.add_argument("--delete", action="store_true", help="delete files that are no whole blocks")
        if name == "purge":
            _add_choices(action)


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
    """Run an action; 1 if `verify` found and kept files that are not whole blocks, else 0."""
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise RametError(f"{directory} is no directory")
    try:
        return _ACTIONS[arguments.action][1](FileStore(directory, "ramet cache"), arguments)
    except OSError as error:
        raise RametError(f"{arguments.action}: {error}") from None


def _list(store: FileStore, arguments: argparse.Namespace) -> int:
    entries = sorted(store.entries(), key=lambda entry: entry.used, reverse=True)
    entries = [entry for entry in entries if arguments.tenant in (None, entry.tenant)]
    table = Table(title=f"{len(entries):,} blocks, {_size(entries)}")
    if arguments.blocks:
        _columns(table, ("block", "tenant"), ("size", "last use"))
        for entry in entries:
            table.add_row(entry.key.hex(), _shown(entry.tenant), _size([entry]), _ago(entry.used))
    else:
        _columns(table, ("tenant",), ("blocks", "size", "first use", "last use"))
        tenants: dict[str, list[StoredBlock]] = defaultdict(list)
        for entry in entries:
            tenants[entry.tenant].append(entry)
        for tenant, own in sorted(tenants.items()):
            uses = [entry.used for entry in own]
            table.add_row(_shown(tenant), f"{len(own):,}", _size(own), _ago(min(uses)), _ago(max(uses)))
    _console().print(table)
    return 0


def _verify(store: FileStore, arguments: argparse.Namespace) -> int:
    found, size, damaged = Counter[str](), 0, []
    for key in tqdm(list(store.keys()), desc="verify", unit="block", disable=None):
        data = store.read(key)
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


def _purge(store: FileStore, arguments: argparse.Namespace) -> int:
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


def _first(entries: Iterable[StoredBlock], excess: float) -> Iterator[StoredBlock]:
    """The first entries that have `excess` bytes together."""
    for entry in entries:
        if excess <= 0:
            return
        yield entry
        excess -= entry.size


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _columns(table: Table, names: Iterable[str], figures: Iterable[str]) -> None:
    for name in names:
        table.add_column(name)
    for figure in figures:
        table.add_column(figure, justify="right")


def _size(entries: Iterable[StoredBlock]) -> str:
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
}

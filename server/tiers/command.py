"""`ramet cache`: lists and deletes the blocks in a directory."""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runtime.errors import RametError
from runtime.features.tiers.files import NOTES, FileStore
from runtime.features.tiers.store import StoredBlock
from runtime.logs import one_line
from server.auth.keys import read_keys

_GIB = 1 << 30
_DAY_S = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions `ls` and `purge` with their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list tenants, their blocks and their last use")
    listing.set_defaults(act=_list)
    purge = actions.add_parser("purge", help="delete blocks")
    purge.set_defaults(act=_purge)
    for action in (listing, purge):
        action.add_argument("directory", type=Path, metavar="DIR", help="the --disk-cache or the --kv-store dir:DIR")
        action.add_argument("--api-keys", type=Path, metavar="FILE", help="the server's, whose names stand for tenants")
    choice = purge.add_mutually_exclusive_group(required=True)
    choice.add_argument("--all", action="store_true", help="delete all blocks")
    choice.add_argument("--tenant", help="delete the blocks of a tenant that `ls` lists")
    choice.add_argument("--unused", type=_positive, metavar="DAYS", help="delete blocks not used for this many days")
    choice.add_argument("--to", type=_positive, metavar="GIB", help="delete the least recently used down to this size")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run an action."""
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise RametError(f"{directory} is no directory")
    try:
        arguments.act(FileStore(directory, "ramet cache"), arguments)
    except OSError as error:
        raise RametError(f"{arguments.action}: {error}") from None
    return 0


def _list(store: FileStore, arguments: argparse.Namespace) -> None:
    names = {tenant.account: tenant.name for tenant in read_keys(arguments.api_keys)}
    tenants: dict[str, list[StoredBlock]] = defaultdict(list)
    for entry in store.entries():
        tenants[entry.tenant].append(entry)
    every = [entry for entries in tenants.values() for entry in entries]
    table = Table("tenant", title=f"{len(every):,} blocks, {_size(every)}")
    for figure in ("blocks", "size", "oldest use", "last use"):
        table.add_column(figure, justify="right")
    for tenant, entries in sorted(tenants.items()):
        uses = [entry.used for entry in entries]
        name = names.get(tenant, one_line(tenant)) or "(nobody)"
        table.add_row(name, f"{len(entries):,}", _size(entries), _ago(min(uses)), _ago(max(uses)))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def _purge(store: FileStore, arguments: argparse.Namespace) -> None:
    if arguments.all or arguments.tenant is not None:
        for note in arguments.directory.glob(f"{NOTES}*"):  # a note may have hashes of the tenant's prompts
            note.unlink()
        accounts = {tenant.name: tenant.account for tenant in read_keys(arguments.api_keys)}
        deleted = store.erase(accounts.get(arguments.tenant, arguments.tenant))
        if not deleted and arguments.tenant is not None:
            hint = "" if arguments.api_keys else "; --api-keys FILE gives names to tenants"
            raise RametError(f"no blocks of a tenant {arguments.tenant!r} in {arguments.directory}{hint}")
        print(f"{deleted:,} blocks deleted")
        return
    entries = sorted(store.entries(), key=lambda entry: entry.used)
    if arguments.unused is not None:
        gone = [entry for entry in entries if entry.used < time.time() - arguments.unused * _DAY_S]
    else:
        sums = accumulate(entry.size for entry in reversed(entries))
        num_kept = sum(total <= arguments.to * _GIB for total in sums)
        gone = entries[: len(entries) - num_kept]
    store.delete([entry.key for entry in gone])
    print(f"{len(gone):,} blocks deleted, {_size(gone)}")


def _size(entries: Iterable[StoredBlock]) -> str:
    return f"{sum(entry.size for entry in entries) / (1 << 20):,.1f} MiB"


def _ago(used: float) -> str:
    seconds = max(time.time() - used, 0.0)
    for unit, length in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"

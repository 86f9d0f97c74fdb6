"""Opens stores and ciphers from options. Packages of the extra `tiers` are imported only when needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ModelError
from runtime.features.tiers.files import FileStore
from runtime.features.tiers.store import BlockStore

if TYPE_CHECKING:
    from runtime.features.tiers.crypt import KeyFile


def open_shared(address: str, option: str = "--kv-store") -> BlockStore:
    """The store that replicas share: `redis://`, `rediss://`, or `dir:PATH`.

    Raises:
        ModelError: if the address has another form, the directory cannot be used, or a package is missing; but not if
            the server does not answer, which is tried again later.
    """
    kind, _, rest = address.partition(":")
    if kind == "dir" and rest:
        return FileStore(Path(rest), option)
    if kind not in ("redis", "rediss") or not rest.startswith("//"):
        raise ModelError(f"{option}: expected redis://HOST:PORT, rediss://HOST:PORT or dir:PATH")
    try:
        from runtime.features.tiers.redis import RedisStore
    except ModuleNotFoundError:
        raise ModelError(f"{option} needs the package redis: `make extra-tiers`") from None
    return RedisStore(address, option=option)


def open_cipher(path: Path, option: str = "--kv-encryption-key-file") -> KeyFile:
    """The keys of a key file.

    Raises:
        ModelError: if a package is missing, or the file cannot be used (see `KeyFile`).
    """
    try:
        from runtime.features.tiers.crypt import KeyFile
    except ModuleNotFoundError:
        raise ModelError(f"{option} needs the package cryptography: `make extra-tiers`") from None
    return KeyFile(path, option)

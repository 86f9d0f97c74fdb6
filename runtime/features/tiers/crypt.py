"""Encryption of blocks with a key for each tenant; erasing a tenant erases its key."""

import fcntl
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from runtime.errors import ModelError
from runtime.features.tiers.block import utf8
from runtime.features.tiers.files import replace_file

T = TypeVar("T")

_NONCE_BYTES, _SALT_BYTES = 12, 16
# Name of the salt for `name_secret`; a tenant's salt has the name `tenant:NAME`.
_NAMES = "names"


class KeyFile:
    """Encrypts with AES-256-GCM. A tenant's key is HKDF-SHA256 (RFC 5869) of the file's secret and the tenant's salt.

    Salts are kept in `FILE.salts`. Without its salt, no copy of a tenant's blocks can ever be read again. Several
    processes may share the two files.

    Args:
        path: a file of at least 32 bytes.

    Attributes:
        name_secret: 32 bytes, mixed into the keys of blocks, so that the keys reveal nothing about tokens.

    Raises:
        ModelError: if the file cannot be read or is too short, or salts cannot be written beside it.
    """

    def __init__(self, path: Path, option: str = "--kv-encryption-key-file"):
        try:
            self._secret = path.read_bytes().strip()
        except OSError as error:
            raise ModelError(f"{option}: {path} cannot be read: {error.strerror}") from None
        if len(self._secret) < 32:
            raise ModelError(f"{option}: {path} has {len(self._secret)} bytes; a key has 32 or more, at random")
        self._path = path.with_name(path.name + ".salts")
        self._lock = Lock()
        self._keys: dict[str, AESGCM] = {}
        self._keys_of: tuple[int, ...] = ()
        try:
            salt = self._salt(_NAMES)
        except OSError as error:
            raise ModelError(f"{option}: salts cannot be kept beside it: {error}") from None
        # A process with other salts cannot read these blocks, and gives its own blocks other keys.
        self.name_secret = self._derive(_NAMES, salt)

    def seal(self, tenant: str, data: bytes, bound: bytes) -> bytes:
        """Nonce, encrypted data and tag, `SEAL_BYTES` longer; OSError if there is no salt and none can be written."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        name = f"tenant:{tenant}"
        key = self._key(tenant) or AESGCM(self._derive(name, self._salt(name)))
        return nonce + key.encrypt(nonce, data, bound)

    def open(self, tenant: str, sealed: memoryview, bound: bytes) -> bytes | None:
        """Decrypt `sealed`; None if these or the `bound` bytes were changed, or if the tenant was erased."""
        try:
            key = self._key(tenant)
            return key.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], bound) if key else None
        except (InvalidTag, OSError, ValueError):
            return None

    def erase(self, tenant: str | None) -> int:
        """Delete the salt of a tenant, or of all (None); returns their number. Later blocks get new salts."""

        def forget(salts: dict[str, str]) -> int:
            gone = [name for name in salts if name != _NAMES and tenant in (None, name.removeprefix("tenant:"))]
            for name in gone:
                del salts[name]
            return len(gone)

        return self._change(forget)

    def _key(self, tenant: str) -> AESGCM | None:
        """The key of a tenant; None without a salt. Reads the salts again if another process has changed them."""
        with self._lock:
            status = self._path.stat()
            state = (status.st_ino, status.st_mtime_ns, status.st_size)
            if state != self._keys_of:
                salts = self._read()
                names = {name.removeprefix("tenant:"): salt for name, salt in salts.items() if name != _NAMES}
                self._keys = {name: AESGCM(self._derive(f"tenant:{name}", salt)) for name, salt in names.items()}
                self._keys_of = state
            return self._keys.get(tenant)

    def _salt(self, name: str) -> str:
        return self._change(lambda salts: salts.setdefault(name, secrets.token_hex(_SALT_BYTES)))

    def _change(self, change: Callable[[dict[str, str]], T]) -> T:
        """Change the salts, under a lock between processes."""
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            salts = self._read() if self._path.exists() else {}
            before = dict(salts)
            result = change(salts)
            if salts != before:
                replace_file(self._path, json.dumps(salts, indent=1).encode())
            return result
        finally:
            os.close(lock)

    def _read(self) -> dict[str, str]:
        try:
            salts = json.loads(self._path.read_bytes())
            return {name: bytes.fromhex(salt).hex() for name, salt in salts.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise OSError(f"{self._path} is damaged: {error}") from None

    def _derive(self, name: str, salt: str) -> bytes:
        info = b"ramet kv 1 " + utf8(name)
        return HKDF(SHA256(), 32, bytes.fromhex(salt), info).derive(self._secret)

"""The secret of an installation, without which nobody can tell which key a tenant's id is made from."""

import os
from contextlib import suppress
from functools import partial
from secrets import token_hex

from runtime.config import default_cache_dir
from server.errors import BadKeys

LEAST_CHARACTERS = 32


def installation_secret() -> bytes:
    """The secret in the cache directory, which the first start makes. Raises BadKeys if it cannot be kept there."""
    path = default_cache_dir() / "tenants.secret"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{token_hex(8)}")
            with open(new, "x", opener=partial(os.open, mode=0o600)) as file:
                file.write(token_hex(32))
            with suppress(FileExistsError):  # another server has made it meanwhile
                os.link(new, path)
            new.unlink()
        secret = path.read_bytes()
    except OSError as error:
        instead = "set $RAMET_CACHE, or add a line `* SECRET` to the keys"
        raise BadKeys(f"the secret of tenants cannot be kept in {path}: {error.strerror}; {instead}") from None
    if len(secret) < LEAST_CHARACTERS:
        raise BadKeys(f"{path} has {len(secret)} bytes; the secret of tenants has {LEAST_CHARACTERS} or more")
    return secret

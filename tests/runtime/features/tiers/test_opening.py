"""Stores and ciphers from options."""

import sys
from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.features.tiers.files import FileStore
from runtime.features.tiers.opening import open_cipher, open_shared


def test_a_directory_is_a_store(tmp_path):
    store = open_shared(f"dir:{tmp_path / 'shared'}")
    assert isinstance(store, FileStore)
    assert (tmp_path / "shared").is_dir()


@pytest.mark.parametrize("address", ["http://host", "dir:", "redis", "", "/path"])
def test_an_address_of_no_known_form(address):
    with pytest.raises(ModelError, match=r"--kv-store: expected redis://HOST:PORT, rediss://HOST:PORT or dir:PATH"):
        open_shared(address)


def test_a_package_that_is_missing_is_named(monkeypatch):
    for name in ("redis", "cryptography"):
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(
            sys.modules, f"runtime.features.tiers.{name.replace('cryptography', 'crypt')}", raising=False
        )
    with pytest.raises(ModelError, match=r"--kv-store needs the package redis: `make extra-tiers`"):
        open_shared("redis://host")
    with pytest.raises(ModelError, match=r"--kv-encryption-key-file needs the package cryptography"):
        open_cipher(Path("key"))

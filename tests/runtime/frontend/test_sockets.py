"""The sockets between the two processes."""

import asyncio
import tempfile

import pytest

from runtime.config import make_config
from runtime.errors import ModelError
from runtime.frontend.async_engine import AsyncEngine


def test_no_room_for_them_is_one_clear_error(tiny_dir, tmp_path, monkeypatch):
    """Names of sockets are short; a full disk takes the same way."""
    directory = tmp_path / ("x" * 120)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(ModelError, match=r"^the engine process cannot be started: .* is longer than"):
        asyncio.run(AsyncEngine(make_config(model=str(tiny_dir))).start())
    assert not list(directory.iterdir())

"""The examples of documents with LangChain and LlamaIndex, unchanged, on the real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import server.documents.examples

ROOM = Path(next(iter(server.documents.examples.__path__)))


def test_langchain(server, client, capsys):
    pytest.importorskip("langchain_openai")
    from server.documents.examples import with_langchain

    answers = with_langchain.main(server.url, "smollm2", "legolink")
    assert len(answers) == 3
    assert all(answers)
    found = [list(map(int, re.findall(r"\d+", line)[:2])) for line in capsys.readouterr().out.splitlines()]
    assert len({prompt for _, prompt in found}) == 1
    assert all(0 < cached < prompt for cached, prompt in found[1:])


def _llamaindex_python() -> str | None:
    given = os.environ.get("RAMET_LLAMAINDEX_PYTHON")
    return given or (sys.executable if find_spec("llama_index") is not None else None)


@pytest.mark.skipif(_llamaindex_python() is None, reason="needs LlamaIndex, here or at $RAMET_LLAMAINDEX_PYTHON")
def test_llamaindex(server, client):
    command = [_llamaindex_python(), str(ROOM / "with_llamaindex.py"), server.url, "smollm2", "legolink"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    reuses = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reuses) == 3
    assert all("'method': 'legolink'" in line for line in reuses)
    assert all("'computed_documents': []" in line for line in reuses[1:])

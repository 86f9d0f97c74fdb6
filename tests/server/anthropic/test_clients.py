"""Anthropic's own client, whose typed models read every answer; on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def _python() -> str | None:
    given = os.environ.get("RAMET_ANTHROPIC_PYTHON")
    return given or (sys.executable if find_spec("anthropic") is not None else None)


@pytest.mark.skipif(_python() is None, reason="needs Anthropic's client, here or at $RAMET_ANTHROPIC_PYTHON")
def test_the_typed_models_of_anthropics_client_read_every_answer(client, server):
    script = Path(__file__).with_name("anthropic_client.py")
    done = subprocess.run([_python(), str(script), server.url, "smollm2"], capture_output=True, text=True, timeout=300)
    client.post("/flush_cache?pins=true")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len({*found["texts"], found["streamed"], found["final"][0]}) == 1
    first, again = found["usages"]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] > 0
    assert first["cache_creation"]["ephemeral_5m_input_tokens"] > 0
    for usage in (first, again, found["final"][1]):
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[part] for part in parts) == found["counted"]
    assert again["cache_read_input_tokens"] == found["counted"] - 1
    assert found["events"][0] == "message_start"
    assert found["events"][-2:] == ["message_delta", "message_stop"]
    assert found["called"][:2] == ["tool_use", "plant"]
    assert found["called"][2] == found["call_streamed"]
    assert found["called"][3] == "tool_use"
    assert found["stopped"] == ["stop_sequence", " tree"]
    assert found["warmed"] == [0, "max_tokens"]
    assert found["unknown"] == "not_found_error"
    assert "temperature" in found["refused"]
    assert len(found["request_id"]) == 32

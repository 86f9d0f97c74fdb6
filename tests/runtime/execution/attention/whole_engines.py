"""The same requests through whole engines with torch's attention and with FlashInfer's, which has to be replaced."""

from pathlib import Path

import pytest

from runtime.execution.executor import Executor
from runtime.offline import Engine

_SHARED = list(range(100, 150))
_PROMPTS = [_SHARED + [200 + i] * (3 * i + 1) for i in range(5)] + [[7, 8, 9]]


def check_whole_engines(path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Executor:
    """Chunks, shared prefixes, partial pages and decode, cold and warm, with a cost rule that shares all it can.

    Both backends must give the same tokens. Returns the executor of FlashInfer's engine.
    """
    monkeypatch.setattr("runtime.execution.attention.flashinfer._MERGE_BYTES", 1)
    options = {"dtype": "float32", "kernels": "torch", "pool_tokens": 2048, "device": "cpu", **options}
    sampling = [{"temperature": 0, "max_new_tokens": 8 - i, "ignore_eos": True} for i in range(3)] * 2
    sampling[3] |= {"temperature": 0.8, "seed": 4, "top_k": 50}
    found = []
    for backend in ("torch", "flashinfer"):
        monkeypatch.setattr("runtime.execution.building.choose_attention", lambda *_, backend=backend: backend)
        with Engine(str(path), **options) as engine:
            found += [[output.token_ids for output in engine.generate(_PROMPTS, sampling)] for _ in range(2)]
            assert engine.info.attention_backend == backend
            executor = engine.core.executor
    assert found[0] == found[1] == found[2] == found[3]
    return executor

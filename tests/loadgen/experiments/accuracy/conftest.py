"""The tokenizer of the small model, and an engine core that forces answers."""

import pytest

from loadgen.offline.forced import Asker


@pytest.fixture(scope="module")
def asker(tiny_dir):
    asker = Asker(tiny_dir, dtype="float32", pool_tokens=8192, chunk_tokens=16, debug_invariants=True)
    yield asker
    asker.close()

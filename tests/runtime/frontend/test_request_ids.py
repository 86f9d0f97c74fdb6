"""Request ids that are used again."""

from __future__ import annotations

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest
from runtime.frontend.async_engine import OutputStream
from runtime.frontend.output import Submission
from runtime.frontend.processor import Frontend
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import Abort, AddRequest, Finish, ModelInfo, TokenEvent


@pytest.fixture
def sent():
    return []


@pytest.fixture
def frontend(tiny_dir, sent):
    names = {"name": "m", "path": "", "architecture": "", "dtype": "", "device": "", "attention_backend": ""}
    sizes = {"vocab_size": 100, "context_length": 64, "page_size": 16, "pool_tokens": 1024}
    info = ModelInfo(**names, **sizes, eos_token_ids=[])
    return Frontend(info, Tokenizer.load(tiny_dir), sent.append, SchedulerConfig())


def submit(stream: OutputStream, *rids: str) -> None:
    for rid in rids:
        stream.submit(Submission([1], SamplingParams(), rid=rid), [1])


def test_a_stream_that_is_closed_leaves_the_successor_of_a_finished_id_alone(frontend, sent):
    first, second = OutputStream(frontend), OutputStream(frontend)
    submit(first, "one", "two")
    with pytest.raises(InvalidRequest, match="in use"):
        submit(second, "one")
    one, two = (message.rid for message in sent if isinstance(message, AddRequest))
    frontend.handle(TokenEvent(one, [5], Finish("stop")))
    submit(second, "one")
    successor = sent[-1].rid
    first.close()
    assert [message.rid for message in sent if isinstance(message, Abort)] == [two]
    assert frontend.num_open == 1
    second.close()
    assert sent[-1] == Abort(successor)
    assert frontend.num_open == 0

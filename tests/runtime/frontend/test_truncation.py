"""Prompts of which only the last tokens are served, and outputs as long as the server allows."""

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import ChunksAsk
from runtime.features.chunks.schemas.compile import ModulePrompt
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.params import SamplingParams
from runtime.protocol import ModelInfo
from tests.runtime.frontend.listening import Listener, ids_of


@pytest.mark.parametrize(
    ("last", "new", "kept"), [(None, 4, None), (3, 4, 3), (-1, 4, 60), (-1, None, 63), (-1, 0, 64), (64, 4, None)]
)
def test_the_last_tokens_that_fit(tokenizer, last, new, kept):
    info = ModelInfo("tiny", "", "", 10_000, 64, [2], "", "", "", 16, 4096)
    inputs = InputProcessor(info, tokenizer, SchedulerConfig())
    ids = list(range(5, 205))
    places = [(150, 60.0), (200, 3600.0)]
    submission = Submission(ids, SamplingParams(max_new_tokens=new), last_tokens=last, breakpoints=places)
    if kept is None:
        with pytest.raises(InvalidRequest, match="64 tokens"):
            inputs.encode(submission)
    else:
        encoded = inputs.encode(submission)
        assert inputs.encode(submission) == encoded, "a submission stays as it was made"
        assert ids_of(encoded) == ids[-kept:]
        assert encoded.breakpoints == [(max(kept - 50, 0), 60.0), (kept, 3600.0)]


@pytest.mark.parametrize(
    ("most", "rows", "stop", "limit"),
    [
        (None, 50, 50, None),
        (10, 50, 50, 10),
        (20, 50, 50, 14),
        (20, 50, 60, 4),
        (60, 20, 63, 1),
        (60, 20, 15, 49),
        (60, 60, 15, 20),
    ],
)
def test_the_limit_of_the_server_is_the_length_of_an_output_without_one(tokenizer, most, rows, stop, limit):
    """Within the context, which counts positions, and the pool of 80 tokens; none lets the engine count."""
    info, sent = ModelInfo("tiny", "", "", 10_000, 64, [2], "", "", "", 16, 80), []
    frontend = OutputProcessor(InputProcessor(info, tokenizer, SchedulerConfig(max_output_tokens=most)), sent.append)
    given = [5] * rows if rows == stop else ModulePrompt([5], ChunksAsk(), [rows - 1], stop)
    submission = Submission(given, SamplingParams(max_new_tokens=None))
    frontend.submit(frontend.inputs.encode(submission), Listener(sent.append))
    assert sent[-1].limits.max_new_tokens == limit
    shared = SamplingParams(max_new_tokens=32_000, min_new_tokens=50)
    for wanted in (shared, shared):
        submission = frontend.inputs.encode(Submission(given, wanted, otherwise=wanted))
        room = max(min(64 - stop, 80 - rows - 32 * (rows != stop), most or 64), 1)  # modules fill pages in part
        for sampling in (submission.sampling, submission.otherwise):
            assert (sampling.max_new_tokens, sampling.min_new_tokens) == (room, min(room, 50))
    assert shared.max_new_tokens == 32_000, "other prompts have it, too"


def test_a_prompt_that_leaves_no_room_is_refused(tokenizer):
    info = ModelInfo("tiny", "", "", 10_000, 64, [2], "", "", "", 16, 80)
    inputs = InputProcessor(info, tokenizer, SchedulerConfig())
    with pytest.raises(InvalidRequest, match="the prompt has 64 tokens and 1 new ones may follow"):
        inputs.encode(Submission([5] * 64, SamplingParams(max_new_tokens=32_000)))

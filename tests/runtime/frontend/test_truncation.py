"""Prompts of which only the last tokens are served."""

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import ModelInfo


@pytest.mark.parametrize(
    ("last", "new", "kept"), [(None, 4, None), (3, 4, 3), (-1, 4, 60), (-1, None, 63), (-1, 0, 64), (64, 4, None)]
)
def test_the_last_tokens_that_fit(tiny_dir, last, new, kept):
    info = ModelInfo("tiny", "", "", 10_000, 64, [2], "", "", "", 16, 4096)
    inputs = InputProcessor(info, Tokenizer.load(tiny_dir), SchedulerConfig())
    ids = list(range(5, 205))
    places = [(150, 60.0), (200, 3600.0)]
    submission = Submission(ids, SamplingParams(max_new_tokens=new), last_tokens=last, breakpoints=places)
    if kept is None:
        with pytest.raises(InvalidRequest, match="64 tokens"):
            inputs.encode(submission)
    else:
        assert inputs.encode(submission) == ids[-kept:]
        assert submission.breakpoints == [(max(kept - 50, 0), 60.0), (kept, 3600.0)]

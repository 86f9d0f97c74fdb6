"""`ramet verify FILE`: computes recorded requests again, under conditions that must not change their answers."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from runtime import Engine, Output, Submission
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.params import SamplingParams
from server.generation.receipts import digest_of, identity_of

# Tokens of the prompts that are made up for a trace: every vocabulary has them.
_TOKENS = range(64, 256)
_SHAPES = (
    "{} requests are of a trace, which has no tokens: prompts of the same lengths and shared blocks are made up, and "
    "their answers compared with each other. To compare recorded answers, record answers with `receipt` and "
    "`return_token_ids`."
)

# Requests at once with the same prompt, and with different ones.
_COPIES, _CLIENTS = 4, 6
# Where an answer differs that has the same tokens.
_BITS = "log-probabilities"

# An answer's tokens, and their log-probabilities.
Result = tuple[list[int], list[float | None]]


@dataclass(frozen=True, slots=True)
class Case:
    """A recorded request.

    Attributes:
        prompt: the prompt's tokens, for a trace made up.
        length: number of the answer's tokens.
        output: the answer's tokens; None: they are not recorded.
        receipt: of the answer; empty for a trace.
    """

    prompt: list[int]
    sampling: SamplingParams
    length: int
    output: list[int] | None
    receipt: Mapping[str, Any]

    @property
    def submission(self) -> Submission:
        # A stop string may have ended the text within these tokens, so their number is the limit.
        sampling = self.sampling.model_copy(update={"max_new_tokens": self.length, "stop": [], "n": 1})
        return Submission(self.prompt, sampling, logprobs=0)

    def parting(self, found: Result, first: Result) -> str | None:
        """Where an answer differs from the recorded one, or from the one under the first condition; None: nowhere."""
        recorded = self.output or first[0]
        if found[0] != recorded:
            pairs = enumerate(zip(recorded, found[0], strict=False))
            return f"token {next((i for i, (one, other) in pairs if one != other), self.length) + 1}"
        return None if found == first else _BITS


def verify(text: str, config: Config) -> int:
    """Print how many answers differ under each condition; returns the exit code, 1 if any does.

    Args:
        text: lines of JSON, each an answer to a request with `receipt` and `return_token_ids`, or a line of a trace.

    Raises:
        InvalidRequest: if no answer can be computed again.
    """
    cases = list(_cases(text))
    if not cases:
        raise InvalidRequest("no line is an answer with a receipt and token ids that can be computed again")
    table = Table("condition", "other tokens", "other bits", "the first that differs", title=f"{len(cases)} answers")
    console, differing, first = Console(), 0, list[Result]()
    if shapes := sum(case.output is None for case in cases):
        console.print(_SHAPES.format(shapes))
    for condition, results in tqdm(_conditions(cases, config, console), desc="conditions", total=7, disable=None):
        first = first or results
        partings = [case.parting(results[i], first[i]) for i, case in enumerate(cases)]
        wrong = [(number, parting) for number, parting in enumerate(partings, 1) if parting is not None]
        bits = sum(parting == _BITS for parting in partings)
        differing += len(wrong)
        shown = f"answer {wrong[0][0]}, {wrong[0][1]}" if wrong else ""
        table.add_row(condition, str(len(wrong) - bits), str(bits), shown)
    console.print(table)
    return 1 if differing else 0


def _conditions(cases: list[Case], config: Config, console: Console) -> Iterator[tuple[str, list[Result]]]:
    """Each condition, and all answers under it. Log-probabilities are compared with those of the first condition."""
    submissions = [case.submission for case in cases]
    with Engine(config=config) as engine:
        _compare_identity(cases, identity_of(engine.info), console)
        yield "cold", [_alone(engine, one) for one in submissions if engine.flush_cache()]
        yield "warm", [_alone(engine, one) for one in submissions]
        engine.flush_cache()
        yield "in one batch", _all(engine, submissions)
        yield "several of each", [_several(engine, one) for one in submissions if engine.flush_cache()]
        engine.flush_cache()
        with ThreadPoolExecutor(_CLIENTS) as clients:
            yield "by several clients", [*clients.map(partial(_alone, engine), submissions)]
        page = engine.info.page_size
    longest = max(len(case.prompt) + case.length for case in cases)
    small = {"pool_tokens": (math.ceil(longest / page) + 4) * page}
    for condition, tiers in (("after evictions", {}), ("from host memory", {"host_memory": 1.0})):
        cache = config.cache.model_copy(update=small)
        changed = {"cache": cache, "tiers": config.tiers.model_copy(update=tiers)}
        with Engine(config=config.model_copy(update=changed)) as engine:
            for one in submissions:  # each evicts KV of the ones before
                _alone(engine, one)
            yield condition, [_alone(engine, one) for one in submissions]


def _alone(engine: Engine, submission: Submission) -> Result:
    return _all(engine, [submission])[0]


def _several(engine: Engine, submission: Submission) -> Result:
    """The answer to each of several requests at once, as with n > 1; if they differ, one that is not the first's."""
    first, *others = _all(engine, [submission] * _COPIES)
    return next((other for other in others if other != first), first)


def _all(engine: Engine, submissions: list[Submission]) -> list[Result]:
    found: list[Result] = [([], []) for _ in submissions]
    fresh = [Submission(one.prompt, one.sampling, logprobs=one.logprobs) for one in submissions]
    for output in engine.stream_all(fresh):
        _add(found[output.index], output)
    return found


def _add(result: Result, output: Output) -> None:
    result[0].extend(output.new_token_ids)
    result[1].extend(entry.logprob for entry in output.logprobs or ())


def _compare_identity(cases: list[Case], mine: dict[str, Any], console: Console) -> None:
    for name, value in mine.items():
        if others := sum(case.receipt.get(name, value) != value for case in cases):
            console.print(f"{others} of {len(cases)} answers were computed with another {name}: they may differ")


def _of_trace(line: Mapping[str, Any]) -> Case:
    """A line of `--record-trace`. The same hash is the same block of tokens."""
    blocks = [Random(block).choices(_TOKENS, k=line["block_tokens"]) for block in line["hash_ids"]]
    prompt = [*chain.from_iterable(blocks)][: line["input_length"]]
    return Case(prompt, SamplingParams(temperature=0, ignore_eos=True), max(line["output_length"], 1), None, {})


def _cases(text: str) -> Iterator[Case]:
    """The requests that can be computed again: exact ones whose tokens do not depend on chance."""
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        try:
            answer = json.loads(line)
            if "hash_ids" in answer:
                yield _of_trace(answer)
                continue
            choice = {**answer.get("meta_info", {}), **answer, **answer.get("choices", [{}])[0]}
            receipt, prompt = choice["receipt"], choice["prompt_token_ids"]
            output: Any = choice.get("token_ids", choice.get("output_ids"))
            sampling = SamplingParams.model_validate(receipt["parameters"])
            digests = [digest_of(array("i", tokens).tobytes()) for tokens in (prompt, output)]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
            message = f"line {number} is neither an answer with a receipt and token ids nor a line of --record-trace"
            raise InvalidRequest(message) from None
        if digests != [receipt["prompt"], receipt["output"]]:
            raise InvalidRequest(f"line {number}: the tokens are not those of the receipt")
        if receipt["exact"] and output and (sampling.temperature == 0 or sampling.seed is not None):
            yield Case(prompt, sampling, len(output), output, receipt)

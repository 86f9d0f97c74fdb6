"""The front end: tracks the requests of submissions in the engine, and detokenizes their output."""

import logging
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace

from runtime.asks import ImagesAsk, ReuseReport
from runtime.errors import InvalidRequest, RametError
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.limits import RequestLimits
from runtime.frontend.output import Encoded, Output, OutputListener, PartedPrompt
from runtime.models.tokenizer import Detokenizer, Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import Abort, AddRequest, Finish, Inbound, Limits, Sampling, TokenEvent

log = logging.getLogger("ramet.client")


class TextStream:
    """The text of one completion, in whole characters, up to a stop string.

    Attributes:
        text: the text to show so far.
        stopped: the stop string that was found; the text ends there.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop = params.stop
        self._trim = not params.no_stop_trim
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, tokens: list[int], may_stop: bool = True, last: bool = False) -> str:
        """Add tokens; returns the text to show now.

        Args:
            tokens: new output tokens.
            may_stop: whether stop strings count (not before `min_new_tokens`).
            last: whether these are the last tokens, so that no text is held back.
        """
        if self.stopped is not None:
            return ""
        self._held += self._detokenizer.push(tokens)
        if last:
            self._held += self._detokenizer.flush()
        if not self._stop:
            keep = len(self._held)
        elif may_stop and (found := self._find_stop()) is not None:
            at, self.stopped = found
            keep = at if self._trim else at + len(self.stopped)
        else:
            keep = len(self._held) if last else len(self._held) - self._suspect()
        delta, self._held = self._held[:keep], self._held[keep:]
        self.text += delta
        return delta

    def _find_stop(self) -> tuple[int, str] | None:
        """Position and text of the first stop string."""
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(found, key=lambda pair: pair[0]) if found else None

    def _suspect(self) -> int:
        """Length of the held text's longest suffix that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


@dataclass(slots=True)
class Choice:
    """An open completion; `listener` gets a copy of `output` when it has something new."""

    submission: Encoded
    text: TextStream
    listener: OutputListener
    started_s: float
    waiting_tokens: int
    output: Output


class OutputProcessor:
    """Tracks every open completion by its engine request id. Not thread-safe: one thread calls it.

    Args:
        inputs: checks and tokenizes submissions.
        send: sends a message to the engine.
    """

    def __init__(self, inputs: InputProcessor, send: Callable[[Inbound], None]):
        self.inputs = inputs
        self._admission = RequestLimits(inputs.config)
        self._send = send
        self._open: dict[str, Choice] = {}
        self._by_submission: dict[tuple[str, str], set[str]] = {}
        self._serial = 0
        self._sent: SamplingParams | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, account: str, completions: int, tokens: int) -> AbstractContextManager[None]:
        """Count an account's work in the server's process while it runs; see `RequestLimits.held`."""
        most = self._admission.most_open(account)
        if completions > most:
            message = f"the request asks for {completions} completions; one client may have {most} open"
            raise InvalidRequest(message, param="n")
        return self._admission.held(account, completions, tokens)

    def check_batch(self, account: str, tokens: int) -> None:
        """See `RequestLimits.check_batch`."""
        self._admission.check_batch(account, tokens)

    def submit(self, submission: Encoded, listener: OutputListener) -> None:
        """Send a submission's completions to the engine. The listener gets the Outputs.

        Raises:
            InvalidRequest: if the request id is in use.
            Overloaded, RateLimited: if the submission exceeds the limits on open requests.
        """
        parted, length = submission.parted, submission.length
        self._admission.check(submission.account, submission.sampling.n, length)
        if submission.key in self._by_submission:
            raise InvalidRequest(f"request id {submission.rid!r} is in use", param="rid")
        sampling = submission.sampling
        now = time.monotonic()
        self._send_sampling(submission)
        most = sampling.max_new_tokens
        if most is None:
            most = self.inputs.lengths.most_output(length, length if parted is None else parted.positions)
        index = listener.add(submission)
        self._by_submission[submission.key] = rids = set()
        images = submission.images.asked if submission.images else None
        self._serial += 1
        for choice in range(sampling.n):
            # The serial number separates late events of an ended request from a new request with the same id.
            rid = f"{submission.rid}/{choice}#{self._serial}"
            seed = None if sampling.seed is None else (sampling.seed + choice) % (1 << 63)
            text = TextStream(self.inputs.tokenizer, sampling)
            waiting = 0 if choice else length
            replayed = 0 if submission.said is None else submission.said.sampled
            output = Output(index, choice, submission.rid, prompt_tokens=length, replayed=replayed)
            self._open[rid] = Choice(submission, text, listener, now, waiting, output)
            self._admission.enter(submission.account, waiting)
            rids.add(rid)
            self._send(
                AddRequest(
                    rid=rid,
                    tokens=submission.tokens,
                    limits=Limits(most, sampling.min_new_tokens, seed),
                    namespace=submission.namespace,
                    account=submission.account,
                    logprobs=submission.logprobs,
                    prompt_logprobs_from=submission.prompt_logprobs_from if choice == 0 else None,
                    priority=submission.priority,
                    decoding=submission.decoding,
                    explain=submission.explain and choice == 0,
                    ask=submission.ask,
                    store=submission.store,
                    hold_s=submission.hold_s,
                    breakpoints=[] if choice else submission.breakpoints,
                    progress=submission.progress and choice == 0,
                    images=ImagesAsk() if images and choice else images,
                )
            )

    def _send_sampling(self, submission: Encoded) -> None:
        """Send the sampling parameters, unless the last submission had them: all prompts of a body share them."""
        if submission.common is not self._sent:
            self._send(Sampling(submission.common, submission.bad_words))
            self._sent = submission.common

    def abort(self, rid: str | None) -> int:
        """Abort the submissions with an id, of any account, or all (None); returns their number.

        Each still gets its last Output.
        """
        found = [choices for (_, one), choices in self._by_submission.items() if rid in (None, one)]
        for choices in found:
            for choice in choices:
                self._send(Abort(choice))
        return len(found)

    def drop(self, submission: Encoded) -> None:
        """Forget a submission and abort it in the engine. Another submission that reuses its id is not affected."""
        for choice in list(self._by_submission.get(submission.key, ())):
            if self._open[choice].submission is submission:
                self._send(Abort(choice))
                self._close(choice)

    def fail_all(self, error: RametError) -> None:
        """End every open completion with `error`, since the engine is gone."""
        for rid in list(self._open):
            self._close(rid).listener.put(error)

    def take(self, events: list[TokenEvent]) -> None:
        """Pass a step's events on to their completions; events of forgotten requests are ignored."""
        for event in events:
            if (choice := self._open.get(event.rid)) is None:
                continue
            try:
                self._take(choice, event)
            except Exception as error:
                # A failure of one request must not end the loop, which serves all requests.
                log.exception("the output of request %s could not be processed", event.rid)
                if event.rid in self._open:
                    self._send(Abort(event.rid))
                    self._close(event.rid)
                    if not isinstance(error, RametError):
                        error = RametError("the output could not be made into text")
                    choice.listener.put(error)

    def _take(self, choice: Choice, event: TokenEvent) -> None:
        output = choice.output
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = (output.prompt_logprobs or []) + event.prompt_logprobs
        if event.admission is not None:
            _note_admission(output, event)
        if not event.tokens and event.finish is None and event.shown is None:
            return
        if event.finish is not None and event.finish.type == "error":
            self._close(event.rid)
            kind = InvalidRequest if event.finish.refused else RametError
            message = event.finish.message or "the engine could not serve this request"
            choice.listener.put(kind(message, param=event.finish.param, code=event.finish.code))
            return
        self._begin(choice)
        output = self._advance(choice, event)
        if output.finish is not None:
            self._remember(choice)
            self._close(event.rid)
            if event.finish is None:
                self._send(Abort(event.rid))
        choice.listener.put(output)

    def _advance(self, choice: Choice, event: TokenEvent) -> Output:
        """The completion's next Output."""
        output = choice.output
        output.new_token_ids, output.delta = _push(choice, event)
        output.text, output.completion_tokens = choice.text.text, len(output.token_ids)
        if event.prefill_s:
            output.prefill_s = event.prefill_s
        output.reuse = _report(choice, event.reuse) or output.reuse
        output.finish = event.finish
        if choice.text.stopped is not None:
            output.finish = Finish("stop", matched=choice.text.stopped)
        output.logprobs = event.logprobs and event.logprobs[: len(output.new_token_ids)]
        output.shown = event.shown
        output.computed = event.computed
        output.drafted += event.drafted
        output.accepted += event.accepted
        output.e2e_s = time.monotonic() - choice.started_s
        snapshot = copy(output)
        output.prompt_logprobs = None
        return snapshot

    def _remember(self, choice: Choice) -> None:
        """Remember an answer for its replay."""
        submission, output = choice.submission, choice.output
        if submission.said is not None and submission.store and not output.choice and output.token_ids:
            said = replace(submission.said, answer=array("i", output.token_ids))
            self.inputs.replay.add(submission.account, submission.namespace, said)

    def _begin(self, choice: Choice) -> None:
        if choice.waiting_tokens:
            self._admission.begin(choice.submission.account, choice.waiting_tokens)
            choice.waiting_tokens = 0

    def _close(self, rid: str) -> Choice:
        choice = self._open.pop(rid)
        self._begin(choice)
        self._admission.leave(choice.submission.account)
        rids = self._by_submission[choice.submission.key]
        rids.discard(rid)
        if not rids:
            del self._by_submission[choice.submission.key]
        return choice


def _note_admission(output: Output, event: TokenEvent) -> None:
    admission = event.admission
    assert admission is not None
    output.cached_tokens, output.queue_s = admission.cached_tokens, admission.queue_s
    output.loaded_tokens = admission.loaded_tokens
    output.lookup, output.usage = event.lookup, event.usage


def _report(choice: Choice, engine: ReuseReport | None) -> ReuseReport | None:
    """The `reuse` of an answer, None if there is nothing new; `engine`: the engine's report."""
    prompt = choice.submission.prompt
    if isinstance(prompt, PartedPrompt) and (engine or choice.output.reuse is None):
        return prompt.report(engine, choice.output.cached_tokens)
    return engine


def _push(choice: Choice, event: TokenEvent) -> tuple[list[int], str]:
    """Add an event's tokens, up to one that completes a stop string; returns these tokens and the text to show now."""
    params, tokens = choice.submission.sampling, choice.output.token_ids
    pieces = [[token] for token in event.tokens] if params.stop and len(event.tokens) > 1 else [event.tokens]
    before, delta = len(tokens), ""
    for i, piece in enumerate(pieces):
        tokens.extend(piece)
        finish = event.finish if i == len(pieces) - 1 else None
        if finish is not None and isinstance(finish.matched, int) and not params.no_stop_trim:
            piece = piece[:-1]  # the text ends before a stop token, as before a stop string
        delta += choice.text.push(piece, len(tokens) >= params.min_new_tokens, finish is not None)
        if choice.text.stopped is not None:
            break
    return tokens[before:], delta

"""The front end: checks and tokenizes submissions, tracks their requests in the engine, detokenizes their output."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Any

from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest, RametError
from runtime.frontend.detokenizer import TextStream
from runtime.frontend.limits import RequestLimits
from runtime.frontend.output import MAX_PLACES, KeptText, Output, PlacedPrompt, Submission
from runtime.models.tokenizer import Tokenizer
from runtime.params import UNASKED, DiffusionParams, ReasoningParams, ReuseParams
from runtime.protocol import Abort, AddRequest, Finish, Inbound, ModelInfo, TokenEvent
from runtime.reuse.fusion.plan import DocumentPrompt, Planner, refuse_reuse
from runtime.reuse.fusion.prompt import Segments
from runtime.reuse.modules.compile import ModulePrompt

OnOutput = Callable[[Output | RametError], None]
_NONE = ReuseParams(method="none")
_NO_REUSE = Planner()


@dataclass(slots=True)
class Choice:
    """An open completion; `output` is told when there is something new in it."""

    submission: Submission
    text: TextStream
    on_output: OnOutput
    started_s: float
    waiting_tokens: int
    output: Output


class Frontend:
    """Tracks every open completion by its engine request id. Not thread-safe: one thread calls it.

    Args:
        info: the loaded model.
        tokenizer: its tokenizer.
        send: sends a message to the engine.
        config: limits on lengths and on open requests.
        bounded: whether requests over the limit on open ones are refused.
        planner: chooses how documents are reused.
        reasoning: whether requests that ask for no reuse share reasoning steps, where that can be.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        send: Callable[[Inbound], None],
        config: SchedulerConfig,
        bounded: bool = True,
        planner: Planner = _NO_REUSE,
        reasoning: bool = False,
    ):
        self._config = config
        self._admission = RequestLimits(config)
        self._bounded = bounded
        self._planner = planner
        self._reasoning = reasoning
        self.info = info
        self.tokenizer = tokenizer
        self._send = send
        self._open: dict[str, Choice] = {}
        self._by_submission: dict[tuple[str, str], set[str]] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, account: str, completions: int, tokens: int) -> AbstractContextManager[None]:
        """Count work under way for an account that is no request of the engine; see `RequestLimits.held`."""
        most = self._admission.most_open(account)
        if completions > most:
            message = f"the request asks for {completions} completions; one client may have {most} open"
            raise InvalidRequest(message, param="n")
        return self._admission.held(account, completions, tokens)

    def encode(self, submission: Submission) -> list[int]:
        """The checked prompt as token ids, with `submission.diffusion` filled for a diffusion model; thread-safe.

        A grammar is not checked.

        Raises:
            InvalidRequest: if it can never be served.
        """
        prompt, sampling = submission.prompt, submission.sampling
        if callable(prompt):
            prompt = submission.prompt = prompt()
        if submission.reuse is not None:
            submission.reuse.check()
        if isinstance(prompt, Segments):
            prompt = submission.prompt = self._place_documents(submission, prompt)
        elif not isinstance(prompt, DocumentPrompt) and isinstance(submission.reuse, ReuseParams):
            refuse_reuse(submission.reuse)
        if isinstance(submission.reuse, ReasoningParams) and (reason := self._no_reasoning(submission)):
            raise InvalidRequest(f"reasoning steps are not shared {reason}", param="reuse")
        if isinstance(prompt, ModulePrompt):
            return self._check_modules(submission, prompt)
        if isinstance(prompt, DocumentPrompt):
            self._check_documents(submission, prompt)
            prompt = prompt.tokens
        tokens = self._tokenize(submission, prompt) if isinstance(prompt, str | KeptText) else prompt
        if submission.last_tokens is not None:
            tokens = self._truncated(tokens, submission)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.check_ids(tokens, "prompt")
        self._check_places(submission, len(tokens))
        sampling.check(self.info.vocab_size)
        start = submission.prompt_logprobs_from
        if start is not None and not 0 <= start < len(tokens):
            raise InvalidRequest(
                f"log-probabilities are wanted from position {start} of a prompt of {len(tokens)} tokens",
                param="prompt_logprobs_from",
            )
        if self.info.diffusion is not None:
            submission.diffusion = self._denoising(submission, tokens)
            self._check_length(len(tokens), submission.diffusion.gen_length)
            self._check_canvas(len(tokens), submission.diffusion)
            return tokens
        if submission.diffusion is not None:
            raise InvalidRequest("this model is no diffusion model", param="diffusion")
        self._check_length(len(tokens), sampling.max_new_tokens)
        return tokens

    def _tokenize(self, submission: Submission, prompt: str | KeptText) -> list[int]:
        """The tokens of a text; the submission learns which of them are to be kept."""
        text, keep = (prompt, []) if isinstance(prompt, str) else (prompt.text, prompt.keep)
        self.check_text(len(text), "prompt")
        special = submission.add_special_tokens
        if not keep:
            return self.tokenizer.encode(text, add_special_tokens=special)
        tokens, places = self.tokenizer.encode_with_places(text, [end for end, _ in keep], special)
        submission.keep = [(place, ttl_s) for place, (_, ttl_s) in zip(places, keep, strict=True)]
        return tokens

    def _check_places(self, submission: Submission, length: int) -> None:
        """Raise InvalidRequest for places to keep that a prompt of `length` tokens does not have."""
        if len(submission.keep) > MAX_PLACES:
            message = f"a prompt is kept up to {MAX_PLACES} places, not {len(submission.keep)}"
            raise InvalidRequest(message, param="keep")
        if not all(0 <= place <= length and ttl_s > 0 for place, ttl_s in submission.keep):
            message = "a place to keep lies within the prompt, and its time is longer than none"
            raise InvalidRequest(message, param="keep")

    def _truncated(self, tokens: list[int], submission: Submission) -> list[int]:
        """The last tokens of a prompt. Raises InvalidRequest for one with documents."""
        last = submission.last_tokens
        assert last is not None
        if isinstance(submission.prompt, DocumentPrompt):
            raise InvalidRequest("a prompt with documents is not truncated", param="last_tokens")
        if last == -1:
            new = submission.sampling.max_new_tokens
            room = self._room - self._positions(1 if new is None else new)
            last = max(min(room, self._config.max_prompt_tokens or room), 1)
        left_out = max(len(tokens) - last, 0)
        submission.keep = [(max(place - left_out, 0), ttl_s) for place, ttl_s in submission.keep]
        return tokens[left_out:]

    def _check_modules(self, submission: Submission, prompt: ModulePrompt) -> list[int]:
        """The own tokens of a prompt that imports modules. Raises InvalidRequest if it can never be served."""
        if self.info.diffusion is not None:
            raise InvalidRequest("a diffusion model takes no modules", param="prompt")
        if submission.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs_from")
        submission.sampling.check(self.info.vocab_size)
        self._check_length(prompt.length, submission.sampling.max_new_tokens, prompt.stop)
        return prompt.tokens

    def _place_documents(self, submission: Submission, prompt: Segments) -> DocumentPrompt:
        """The tokens of a prompt with documents, and how these are reused. Raises InvalidRequest."""
        self.check_text(prompt.num_characters, "prompt")
        asked = None if isinstance(submission.reuse, ReasoningParams) else submission.reuse
        special = self.info.diffusion is not None or submission.prompt_logprobs_from is not None
        if asked is None and (special or submission.namespace.adapter):
            asked = _NONE  # the default is for those that it can serve
        return self._planner.plan(prompt.tokenize(self.tokenizer, submission.add_special_tokens), asked)

    def _no_reasoning(self, submission: Submission) -> str | None:
        """The reason for which a submission's reasoning steps cannot be shared; None: they can."""
        prompt = submission.prompt
        if self.info.diffusion is not None:
            return "by a diffusion model"
        if submission.prompt_logprobs_from is not None:
            return "where log-probabilities of the prompt are wanted"
        if submission.namespace.adapter:
            return "with an adapter"
        if isinstance(prompt, ModulePrompt) or (isinstance(prompt, DocumentPrompt) and prompt.names):
            return "behind modules or documents"
        return None

    def _reuse_of(self, submission: Submission) -> dict[str, Any] | None:
        """The field `reuse` of an encoded submission's messages."""
        asked = submission.reuse
        if asked is None and self._reasoning and self._no_reasoning(submission) is None:
            asked = ReasoningParams()
        if isinstance(asked, ReasoningParams):
            return asked.model_dump()
        return submission.prompt.reuse if isinstance(submission.prompt, PlacedPrompt) else None

    def _check_documents(self, submission: Submission, prompt: DocumentPrompt) -> None:
        """Raise InvalidRequest if the documents' reuse can never be served."""
        if prompt.reuse is None:
            return
        if self.info.diffusion is not None:
            raise InvalidRequest("a diffusion model reuses no documents", param="reuse")
        if submission.namespace.adapter:
            raise InvalidRequest("documents are not reused with an adapter", param="reuse")
        if submission.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts whose documents are reused have no log-probabilities", param="reuse")

    def check_ids(self, tokens: list[int], param: str) -> None:
        """Raise InvalidRequest for ids that the model does not have."""
        vocab = self.info.vocab_size
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
            bad = next(t for t in tokens if not 0 <= t < vocab)
            raise InvalidRequest(f"token id {bad} is out of range: the model has {vocab} tokens", param=param)

    def check_text(self, length: int, param: str) -> None:
        """Refuse text too long for any tokenization to fit, before it is tokenized. Raises InvalidRequest."""
        most = self.info.context_length * self.tokenizer.longest_token
        if length > most:
            raise InvalidRequest(
                f"the text has {length} characters; {self.info.context_length} tokens stand for {most} at most",
                param=param,
                code="context_length_exceeded",
            )

    def _denoising(self, submission: Submission, tokens: list[int]) -> DiffusionParams:
        """The denoising parameters of a submission, with all defaults filled in. Raises InvalidRequest."""
        info = self.info.diffusion
        assert info is not None
        if submission.logprobs is not None or submission.prompt_logprobs_from is not None:
            raise InvalidRequest("log-probabilities are not supported for diffusion models", param="logprobs")
        params = submission.diffusion or DiffusionParams()
        shares = info.attended is None and params.prefix_tokens is None
        if shares and submission.shared_text and (shared_text := submission.shared_text()):
            shared = self.tokenizer.encode(shared_text, submission.add_special_tokens)
            differ = (i for i, (mine, theirs) in enumerate(zip(shared, tokens, strict=False)) if mine != theirs)
            params = params.model_copy(update={"prefix_tokens": next(differ, min(len(shared), len(tokens)))})
        if params.gen_length is None and submission.sampling.max_new_tokens is None:
            params = params.model_copy(update={"gen_length": self._unasked(len(tokens))})
        filled = params.filled(info, submission.sampling)
        filled.check(info, submission.sampling, info.num_layers, len(tokens))
        return filled

    def _check_length(self, prompt: int, new: int | None, positions: int | None = None) -> None:
        """`positions`: of the prompt, if there are others than tokens."""
        config = self._config
        if config.max_prompt_tokens is not None and prompt > config.max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; this server takes {config.max_prompt_tokens}",
                param="prompt",
                code="context_length_exceeded",
            )
        if config.max_output_tokens is not None and (new or 0) > config.max_output_tokens:
            raise InvalidRequest(
                f"{new} new tokens are asked for; this server gives {config.max_output_tokens}", param="max_new_tokens"
            )
        for used, limit, what in (
            (prompt if positions is None else positions, self.info.context_length, "the model's context is"),
            (prompt, self.info.pool_tokens, "the KV pool holds"),
        ):
            if used + (wanted := 1 if new is None else new) > limit:
                raise InvalidRequest(
                    f"the prompt has {used} tokens and {wanted} new ones may follow, but {what} {limit} tokens",
                    param="prompt" if used >= limit else "max_new_tokens",
                    code="context_length_exceeded",
                )

    @property
    def _room(self) -> int:
        """Most positions that a request can have."""
        return min(self.info.context_length, self.info.pool_tokens)

    @property
    def _canvas(self) -> int:
        """Positions that are denoised as a whole behind a prompt; 1: those that are asked for."""
        info = self.info.diffusion
        return info.block if info is not None and info.algorithm == "entropy_bound" else 1

    def _positions(self, new: int) -> int:
        """Positions of new tokens: those of whole canvases, where these begin behind the prompt."""
        return -(-new // self._canvas) * self._canvas

    def _unasked(self, prompt: int) -> int:
        """Length of a diffusion model's answer to a request that sets no limit, at least 1."""
        room = (self._room - prompt) // self._canvas * self._canvas
        return max(min(max(UNASKED, self._canvas), room, self._config.max_output_tokens or room), 1)

    def _check_canvas(self, prompt: int, params: DiffusionParams) -> None:
        """Raise InvalidRequest if the canvases need more positions than there are, or guidance more pages."""
        wanted, room = self._positions(params.gen_length or 0), self._room
        if prompt + wanted > room:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and canvases of {params.block_length} take {wanted} more, but there "
                f"is room for {room} tokens",
                param="max_new_tokens",
                code="context_length_exceeded",
            )
        page_size = self.info.page_size
        pages = -(-(prompt + (params.gen_length or 0)) // page_size)
        if params.cfg_scale and 2 * pages * page_size > self.info.pool_tokens:
            raise InvalidRequest(
                f"guidance needs 2 x {pages * page_size} tokens of the KV pool, which holds {self.info.pool_tokens}",
                param="diffusion.cfg_scale",
                code="context_length_exceeded",
            )

    def submit(self, submission: Submission, tokens: list[int], index: int, on_output: OnOutput) -> None:
        """Send a submission's completions to the engine.

        Args:
            submission: the prompt and its parameters.
            tokens: the prompt as `encode` returned it.
            index: the submission's place in its call.
            on_output: called with every Output, the last of a completion with `finish` set, or once per completion
                with an error.

        Raises:
            InvalidRequest: if the request id is in use.
            Overloaded, RateLimited: if too much is open.
        """
        placed = submission.prompt if isinstance(submission.prompt, PlacedPrompt) else None
        length = len(tokens) if placed is None else placed.length
        if self._bounded:
            self._admission.check(submission.account, submission.sampling.n, length)
        if submission.key in self._by_submission:
            raise InvalidRequest(f"request id {submission.rid!r} is in use", param="rid")
        key = submission.tokens = array("i", tokens).tobytes()
        sampling = submission.sampling
        now = time.monotonic()
        fields = sampling.model_dump(exclude={"stop"})  # stop strings are found here, in the text
        if sampling.max_new_tokens is None:
            fields["max_new_tokens"] = self._most_output(length, length if placed is None else placed.stop)
        reuse = self._reuse_of(submission)
        self._by_submission[submission.key] = rids = set()
        self._serial += 1
        for choice in range(sampling.n):
            # The serial keeps late events of an ended request from one that reuses its id.
            rid = f"{submission.rid}/{choice}#{self._serial}"
            seed = None if sampling.seed is None else (sampling.seed + choice) % (1 << 63)
            text = TextStream(self.tokenizer, sampling)
            waiting = 0 if choice else length
            output = Output(index, choice, submission.rid, prompt_tokens=length)
            self._open[rid] = Choice(submission, text, on_output, now, waiting, output)
            self._admission.enter(submission.account, waiting)
            rids.add(rid)
            self._send(
                AddRequest(
                    rid=rid,
                    tokens=key,
                    sampling={**fields, "seed": seed},
                    namespace=submission.namespace,
                    account=submission.account,
                    logprobs=submission.logprobs,
                    prompt_logprobs_from=submission.prompt_logprobs_from if choice == 0 else None,
                    priority=submission.priority,
                    diffusion=None if submission.diffusion is None else submission.diffusion.model_dump(),
                    explain=submission.explain and choice == 0,
                    reuse=reuse,
                    store=submission.store,
                    keep=[] if choice else submission.keep,
                )
            )

    def _most_output(self, prompt: int, positions: int) -> int | None:
        """Most output tokens of a request that sets no limit; None: as many as the context holds."""
        if self._config.max_output_tokens is None:
            return None
        return min(self._config.max_output_tokens, self.info.context_length - positions, self.info.pool_tokens - prompt)

    def abort(self, rid: str | None) -> None:
        """Abort the submissions of an id, of any account, or all (None); each still gets its last Output."""
        for (_, one), choices in self._by_submission.items():
            for choice in choices if rid in (None, one) else ():
                self._send(Abort(choice))

    def drop(self, submission: Submission) -> None:
        """Forget a submission and abort it in the engine; a later one that reuses its id is not affected."""
        for choice in list(self._by_submission.get(submission.key, ())):
            if self._open[choice].submission is submission:
                self._send(Abort(choice))
                self._close(choice)

    def fail(self, rid: str, error: RametError) -> None:
        if (choice := self._open.get(rid)) is not None:
            self._send(Abort(rid))
            self._close(rid)
            choice.on_output(error)

    def fail_all(self, error: RametError) -> None:
        """End every open completion with `error`: the engine is gone."""
        for rid in list(self._open):
            choice = self._open[rid]
            self._close(rid)
            choice.on_output(error)

    def handle(self, event: TokenEvent) -> None:
        """Pass a step's event on to its completion; events of forgotten requests are ignored."""
        choice = self._open.get(event.rid)
        if choice is None:
            return
        output = choice.output
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = (output.prompt_logprobs or []) + event.prompt_logprobs
        output.cached_tokens = event.cached_tokens or output.cached_tokens
        output.lookup = event.lookup or output.lookup
        output.loaded_tokens = event.loaded_tokens or output.loaded_tokens
        output.cache = event.cache or output.cache
        if not event.tokens and event.finish is None and event.canvas is None:
            return
        if event.finish is not None and event.finish.type == "error":
            self._close(event.rid)
            kind = InvalidRequest if event.finish.refused else RametError
            message = event.finish.message or "the engine could not serve this request"
            choice.on_output(kind(message, param=event.finish.param, code=event.finish.code))
            return
        self._begin(choice)
        output = self._advance(choice, event)
        if output.finish is not None:
            self._close(event.rid)
            if event.finish is None:
                self._send(Abort(event.rid))
        choice.on_output(output)

    def _advance(self, choice: Choice, event: TokenEvent) -> Output:
        """The completion's next Output."""
        output = choice.output
        output.new_token_ids, output.delta = _push(choice, event)
        output.text, output.completion_tokens = choice.text.text, len(output.token_ids)
        if event.tokens:
            output.queue_s, output.prefill_s = event.queue_s, event.prefill_s
        output.reuse = _report(choice, event.reuse) or output.reuse
        output.finish = event.finish
        if choice.text.stopped is not None:
            output.finish = Finish("stop", matched=choice.text.stopped)
        output.logprobs = event.logprobs and event.logprobs[: len(output.new_token_ids)]
        output.canvas, output.drafted, output.accepted = event.canvas, event.drafted, event.accepted
        output.e2e_s = time.monotonic() - choice.started_s
        told = copy(output)
        output.prompt_logprobs = None
        return told

    def _begin(self, choice: Choice) -> None:
        if choice.waiting_tokens:
            self._admission.begin(choice.submission.account, choice.waiting_tokens)
            choice.waiting_tokens = 0

    def _close(self, rid: str) -> None:
        choice = self._open.pop(rid)
        self._begin(choice)
        self._admission.leave(choice.submission.account)
        rids = self._by_submission[choice.submission.key]
        rids.discard(rid)
        if not rids:
            del self._by_submission[choice.submission.key]


def _report(choice: Choice, engine: dict[str, Any] | None) -> dict[str, Any] | None:
    """The `reuse` of an answer, if there is something new; `engine`: as the engine has it."""
    prompt = choice.submission.prompt
    if isinstance(prompt, DocumentPrompt) and (engine or choice.output.reuse is None):
        return prompt.report(engine, choice.output.cached_tokens)
    return engine


def _push(choice: Choice, event: TokenEvent) -> tuple[list[int], str]:
    """Add an event's tokens, up to one that completes a stop string; these tokens, and the text to show now."""
    params, tokens = choice.submission.sampling, choice.output.token_ids
    pieces = [[token] for token in event.tokens] if params.stop and len(event.tokens) > 1 else [event.tokens]
    before, delta = len(tokens), ""
    for i, piece in enumerate(pieces):
        tokens.extend(piece)
        last = event.finish is not None and i == len(pieces) - 1
        delta += choice.text.push(piece, len(tokens) >= params.min_new_tokens, last)
        if choice.text.stopped is not None:
            break
    return tokens[before:], delta

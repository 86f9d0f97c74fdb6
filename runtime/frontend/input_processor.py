"""Checks and tokenizes submissions. Submissions that can never be served are refused."""

from array import array
from bisect import bisect_right

from msgspec.structs import replace

from runtime.asks import AnyReuse, ReuseAsk, ReuseParams
from runtime.config import SchedulerConfig
from runtime.denoising import DEFAULT_LENGTH, BidirectionalParams, DenoisingParams, DiffusionParams
from runtime.errors import InvalidRequest, TooLong
from runtime.features.chunks.documents.plan import DocumentPlanner, DocumentPrompt, refuse_reuse
from runtime.features.chunks.documents.prompt import Segments
from runtime.features.chunks.schemas.compile import ModulePrompt
from runtime.frontend.output import MAX_BREAKPOINTS, Encoded, MarkedText, PlacedPrompt, Prompt, Submission
from runtime.frontend.replay import NOTHING, Replay, Said
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import ModelInfo

NO_REUSE = DocumentPlanner()
_NONE = ReuseParams(method="none")


class InputProcessor:
    """Checks and tokenizes submissions.

    Args:
        info: the loaded model.
        tokenizer: the model's tokenizer.
        config: limits on lengths and on open requests.
        planner: chooses how documents are reused.
        default: the reuse of requests that ask for none, where it is possible; None: none.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        planner: DocumentPlanner = NO_REUSE,
        default: AnyReuse | None = None,
    ):
        self.info, self.tokenizer = info, tokenizer
        self.config, self._planner, self._default = config, planner, default
        self.replay = Replay(tokenizer)

    def encode(self, submission: Submission, before: Encoded | None = None) -> Encoded:
        """Check and tokenize a submission. Does not check a grammar. Thread-safe.

        Args:
            submission: see above.
            before: another submission; if it had the same parameters, they are not checked again.

        Raises:
            InvalidRequest: if the submission can never be served.
        """
        encoded = self._with_prompt(submission)
        if isinstance(encoded.prompt, ModulePrompt):
            encoded = self._with_modules(encoded, encoded.prompt, before)
        else:
            encoded = self._with_tokens(encoded, before)
        return replace(encoded, ask=self._ask_of(encoded))

    def _with_prompt(self, submission: Submission) -> Encoded:
        """The submission with its prompt, whose documents are placed. Checks whether what it reuses can be reused."""
        prompt = submission.prompt() if callable(submission.prompt) else submission.prompt
        if submission.images and (reason := self._no_images(submission, prompt)):
            raise InvalidRequest(f"images are not served {reason}", param="messages")
        if submission.reuse is not None:
            submission.reuse.check()
        if isinstance(prompt, Segments):
            prompt = self._place_documents(submission, prompt)
        elif isinstance(prompt, ModulePrompt):
            asks = submission.reuse if isinstance(submission.reuse, ReuseParams) else None
            prompt = self._planner.repair(prompt, asks)
        elif not isinstance(prompt, DocumentPrompt) and isinstance(submission.reuse, ReuseParams):
            refuse_reuse(submission.reuse)
        encoded, asked = Encoded.of(submission, prompt), submission.reuse
        if asked is not None and not isinstance(asked, ReuseParams) and (reason := self._refusal(encoded)):
            raise InvalidRequest(f"{asked.method} is not served {reason}", param="reuse")
        ask = prompt.ask if isinstance(prompt, PlacedPrompt) else None
        if ask is not None and ask.method != "none" and (reason := self._exact(submission)):
            what = "documents are not reused" if ask.documents else "modules are not repaired"
            raise InvalidRequest(f"{what} {reason}", param="reuse")
        return encoded

    def _with_tokens(self, submission: Encoded, before: Encoded | None) -> Encoded:
        """The submission of a prompt without modules, with all that `encode` fills in but the ask."""
        said, breakpoints, prompt = None, submission.breakpoints, submission.prompt
        if isinstance(prompt, str | MarkedText):
            tokens, breakpoints, said = self._tokenize(submission, prompt)
        else:
            assert isinstance(prompt, DocumentPrompt | list), "see `_with_prompt`"
            tokens = prompt.tokens if isinstance(prompt, DocumentPrompt) else prompt
        if submission.last_tokens is not None:
            tokens, breakpoints = self._truncated(tokens, breakpoints, submission)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if submission.images:
            submission.images.place(tokens)
        self.check_ids([token for token in tokens if token >= 0] if submission.images else tokens, "prompt")
        self._check_places(breakpoints, len(tokens))
        submission = self._with_sampling(submission, before, len(tokens))
        start = submission.prompt_logprobs_from
        if start is not None and not 0 <= start < len(tokens):
            raise InvalidRequest(
                f"log-probabilities are wanted from position {start} of a prompt of {len(tokens)} tokens",
                param="prompt_logprobs_from",
            )
        data = array("i", tokens).tobytes()
        submission = replace(submission, tokens=data, breakpoints=breakpoints, said=said)
        if self.info.diffusion is not None:
            diffusion = self._denoising(submission, tokens)
            self._check_length(len(tokens), diffusion.gen_length)
            self._check_guidance(len(tokens), diffusion)
            return replace(submission, diffusion=diffusion)
        if submission.diffusion is not None:
            raise InvalidRequest("this model is not a diffusion model", param="diffusion")
        self._check_length(len(tokens), submission.sampling.max_new_tokens)
        return submission

    def _tokenize(
        self, submission: Submission, prompt: str | MarkedText
    ) -> tuple[list[int], list[tuple[int, float]], Said | None]:
        """The tokens of a text, its breakpoints in tokens, and what its answer's replay needs; None: no replay."""
        text, keep = (prompt, []) if isinstance(prompt, str) else (prompt.text, prompt.breakpoints)
        self.check_text(len(text), "prompt")
        special, encoder = submission.add_special_tokens, submission.images or self.tokenizer
        replays = submission.replay and not special and self.info.diffusion is None
        if not (keep or replays):
            return encoder.encode(text, add_special_tokens=special), submission.breakpoints, None
        before = self.replay.find(submission.account, submission.namespace, text) if replays else NOTHING
        start = before.characters
        if submission.images:
            submission.images.read(text[:start])
        rest, rest_ends = encoder.encode_with_ends(text[start:], special)
        tokens, ends = before.tokens + array("i", rest), before.ends + array("i", [start + end for end in rest_ends])
        said = Said(text, tokens, ends, before.sampled, array("i")) if replays else None
        return tokens.tolist(), [(bisect_right(ends, place), ttl_s) for place, ttl_s in keep], said

    def _check_places(self, breakpoints: list[tuple[int, float]], length: int) -> None:
        """Raise InvalidRequest for breakpoints that do not fit a prompt of `length` tokens."""
        if len(breakpoints) > MAX_BREAKPOINTS:
            message = f"a prompt has {MAX_BREAKPOINTS} breakpoints at most, not {len(breakpoints)}"
            raise InvalidRequest(message, param="breakpoints")
        if not all(0 <= place <= length and ttl_s > 0 for place, ttl_s in breakpoints):
            message = "a breakpoint must be within the prompt, and its time to live longer than 0 s"
            raise InvalidRequest(message, param="breakpoints")

    def _truncated(
        self, tokens: list[int], breakpoints: list[tuple[int, float]], submission: Submission
    ) -> tuple[list[int], list[tuple[int, float]]]:
        """The last tokens of a prompt, see `Submission.last_tokens`, and their breakpoints.

        Raises InvalidRequest if the prompt has documents.
        """
        last = submission.last_tokens
        assert last is not None
        if isinstance(submission.prompt, DocumentPrompt):
            raise InvalidRequest("a prompt with documents cannot be truncated", param="last_tokens")
        if last == -1:
            new = submission.sampling.max_new_tokens
            room = self._room - self._positions(1 if new is None else new)
            last = max(room, 1)
        left_out = max(len(tokens) - last, 0)
        return tokens[left_out:], [(max(place - left_out, 0), ttl_s) for place, ttl_s in breakpoints]

    def _with_modules(self, submission: Encoded, prompt: ModulePrompt, before: Encoded | None) -> Encoded:
        """The submission of a prompt with modules; its tokens lack those of the modules. Raises InvalidRequest."""
        if self.info.diffusion is not None:
            raise InvalidRequest("a diffusion model takes no modules", param="prompt")
        if submission.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs_from")
        pages = self.info.page_size * (len(prompt.rows) + 1)  # that may be partly filled
        submission = self._with_sampling(submission, before, prompt.length + pages, prompt.stop)
        self._check_length(prompt.length, submission.sampling.max_new_tokens, prompt.stop)
        return replace(submission, tokens=array("i", prompt.tokens).tobytes())

    def _bad_words(self, sampling: SamplingParams, before: Encoded | None) -> list[list[int]]:
        """Check sampling parameters; returns the tokens of bad words. `before`: see `encode`."""
        if before is not None and before.common is sampling:
            return before.bad_words
        sampling.check(self.info.vocab_size)
        return self._tokens_of_words(sampling.bad_words)

    def _tokens_of_words(self, words: list[str]) -> list[list[int]]:
        """The tokens of each word at a line's start and, as vLLM takes it, behind a space. Raises InvalidRequest."""
        if not words:
            return []
        bare = self.tokenizer.encode_each([word.lstrip() for word in words])
        if not all(bare):
            raise InvalidRequest("a bad word is white space", param="bad_words")
        spaced = self.tokenizer.encode_each([f" {word.lstrip()}" for word in words])
        pairs = zip(bare, spaced, strict=True)
        return bare + [after for one, after in pairs if after[0] != one[0] and len(after) == len(one)]

    def _place_documents(self, submission: Submission, prompt: Segments) -> DocumentPrompt:
        """The tokens of a prompt with documents, and how the documents are reused. Raises InvalidRequest."""
        self.check_text(prompt.num_characters, "prompt")
        asked = submission.reuse if isinstance(submission.reuse, ReuseParams) else None
        if asked is None and self._exact(submission):
            asked = _NONE  # the server's default method cannot serve this submission
        return self._planner.plan(prompt.tokenize(self.tokenizer, submission.add_special_tokens), asked)

    def _exact(self, submission: Submission) -> str | None:
        """Why a submission must be computed exactly, without approximate reuse; None if it need not be."""
        if self.info.diffusion is not None:
            return "by a diffusion model"
        if submission.prompt_logprobs_from is not None:
            return "where log-probabilities of the prompt are wanted"
        if submission.images:
            return "with images"
        return "with an adapter" if submission.namespace.adapter else None

    def _no_images(self, submission: Submission, prompt: Prompt) -> str | None:
        """Why a submission of a prompt cannot have images; None if it can."""
        if not isinstance(prompt, str | MarkedText):
            return "beside modules or documents, or with token ids"
        if submission.last_tokens is not None:
            return "in a prompt that is truncated"
        return None if submission.prompt_logprobs_from is None else "with log-probabilities of the prompt"

    def _refusal(self, submission: Submission) -> str | None:
        """Why a submission can have no reuse but that of its prompt's parts; None if it can."""
        prompt = submission.prompt
        if (reason := self._exact(submission)) is not None:
            return reason
        if isinstance(prompt, ModulePrompt) or (isinstance(prompt, DocumentPrompt) and prompt.names):
            return "behind modules or documents"
        return None

    def _ask_of(self, submission: Encoded) -> ReuseAsk | None:
        asked = submission.reuse
        if asked is None and self._default is not None and self._refusal(submission) is None:
            asked = self._default
        if asked is not None and not isinstance(asked, ReuseParams):
            return asked.ask()
        return None if submission.placed is None else submission.placed.ask

    def check_ids(self, tokens: list[int], param: str) -> None:
        """Raise InvalidRequest for ids that the model does not have."""
        vocab = self.info.vocab_size
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
            bad = next(t for t in tokens if not 0 <= t < vocab)
            raise InvalidRequest(f"token id {bad} is out of range: the model has {vocab} tokens", param=param)

    def check_text(self, length: int, param: str) -> None:
        """Raise InvalidRequest if a text is too long to fit, however it is tokenized; `length` in characters."""
        most = self.info.context_length * self.tokenizer.longest_token
        if length > most:
            raise InvalidRequest(
                f"the prompt is too long: it has {length} characters; this model's maximum context length is "
                f"{self.info.context_length} tokens, which have {most} characters at most",
                param=param,
                code="context_length_exceeded",
            )

    def _denoising(self, submission: Submission, tokens: list[int]) -> DenoisingParams:
        """The denoising parameters of a submission, with all defaults filled in. Raises InvalidRequest."""
        info = self.info.diffusion
        assert info is not None
        if submission.logprobs is not None or submission.prompt_logprobs_from is not None:
            raise InvalidRequest("log-probabilities are not supported for diffusion models", param="logprobs")
        params = submission.diffusion or DiffusionParams()
        if isinstance(params, DiffusionParams):
            params = self._with_length_and_prefix(params, submission, tokens).filled(info, submission.sampling)
        params.check(info, submission.sampling, info.num_layers, len(tokens))
        return params

    def _with_length_and_prefix(
        self, params: DiffusionParams, submission: Submission, tokens: list[int]
    ) -> DiffusionParams:
        """The parameters with `prefix_tokens` of a chat, and with `gen_length` of a request without a limit."""
        info = self.info.diffusion
        assert info is not None
        shares = info.attended is None and params.prefix_tokens is None
        if shares and submission.shared_text and (shared_text := submission.shared_text()):
            shared = self.tokenizer.encode(shared_text, submission.add_special_tokens)
            differ = (i for i, (mine, theirs) in enumerate(zip(shared, tokens, strict=False)) if mine != theirs)
            params = params.model_copy(update={"prefix_tokens": next(differ, min(len(shared), len(tokens)))})
        if params.gen_length is None and submission.sampling.max_new_tokens is None:
            params = params.model_copy(update={"gen_length": self._unasked(len(tokens))})
        return params

    def _with_sampling(
        self, submission: Encoded, before: Encoded | None, prompt: int, positions: int | None = None
    ) -> Encoded:
        """Check the sampling parameters. The most new tokens become what so long a prompt leaves, but at least one.

        `positions`: of the prompt, if they are not its tokens.
        """
        sampling, otherwise = submission.sampling, submission.otherwise
        bad_words = self._bad_words(sampling, before)
        new = sampling.max_new_tokens or 0
        room = min(self.info.context_length - (positions or prompt), self.info.pool_tokens - prompt)
        most = max(min(room // self._canvas * self._canvas, self.config.max_output_tokens or room), 1)
        if new > most:
            least = min(sampling.min_new_tokens, most)
            clipped = {"max_new_tokens": most, "min_new_tokens": least}
            sampling = sampling.model_copy(update=clipped)
            otherwise = otherwise and otherwise.model_copy(update=clipped)
        return replace(submission, sampling=sampling, otherwise=otherwise, bad_words=bad_words)

    def _check_length(self, prompt: int, new: int | None, positions: int | None = None) -> None:
        """Raise InvalidRequest if `new` tokens do not fit; `positions`: of the prompt, if they are not its tokens."""
        config = self.config
        if config.max_output_tokens is not None and (new or 0) > config.max_output_tokens:
            raise InvalidRequest(
                f"{new} new tokens are requested; this server allows {config.max_output_tokens}", param="max_new_tokens"
            )
        for used, limit, what in (
            (positions or prompt, self.info.context_length, "this model's maximum context length"),
            (prompt, self.info.pool_tokens, "the size of the KV pool"),
        ):
            if used + (wanted := 1 if new is None else self._positions(new)) > limit:
                raise TooLong(used, wanted, limit, what=what, param="prompt" if used >= limit else "max_new_tokens")

    @property
    def _room(self) -> int:
        """Largest number of positions that a request can have."""
        return min(self.info.context_length, self.info.pool_tokens)

    @property
    def _canvas(self) -> int:
        """Positions in a canvas that is always denoised as a whole; 1 for models that denoise any number."""
        info = self.info.diffusion
        return info.block if info is not None and info.algorithm == "entropy_bound" else 1

    def _positions(self, new: int) -> int:
        """Number of positions for `new` tokens, rounded up to whole canvases."""
        return -(-new // self._canvas) * self._canvas

    def _unasked(self, prompt: int) -> int:
        """Output length of a diffusion model for a request without a limit, at least 1."""
        room = (self._room - prompt) // self._canvas * self._canvas
        return max(min(max(DEFAULT_LENGTH, self._canvas), room, self.config.max_output_tokens or room), 1)

    def _check_guidance(self, prompt: int, params: DenoisingParams) -> None:
        """Raise InvalidRequest if classifier-free guidance needs more pages than the pool has."""
        page_size = self.info.page_size
        pages = -(-(prompt + (params.gen_length or 0)) // page_size)
        is_guided = isinstance(params, BidirectionalParams) and params.cfg_scale
        if is_guided and 2 * pages * page_size > self.info.pool_tokens:
            raise InvalidRequest(
                f"guidance needs 2 x {pages * page_size} tokens of the KV pool, which holds {self.info.pool_tokens}",
                param="diffusion.cfg_scale",
                code="context_length_exceeded",
            )

    def most_output(self, prompt: int, positions: int) -> int | None:
        """Output limit of a request that sets none, in tokens; None: as many as the context holds."""
        if self.config.max_output_tokens is None:
            return None
        return min(self.config.max_output_tokens, self.info.context_length - positions, self.info.pool_tokens - prompt)

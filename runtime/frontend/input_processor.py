"""Checks and tokenizes submissions. Submissions that can never be served are refused."""

from array import array
from bisect import bisect_right

from runtime.asks import AnyReuse, ReuseAsk
from runtime.config import SchedulerConfig
from runtime.denoising import DEFAULT_LENGTH, BidirectionalParams, DenoisingParams, DiffusionParams
from runtime.errors import InvalidRequest, TooLong
from runtime.frontend.documents.plan import DocumentPlanner, DocumentPrompt, refuse_reuse
from runtime.frontend.documents.prompt import Segments
from runtime.frontend.output import MAX_BREAKPOINTS, MarkedText, PlacedPrompt, Submission
from runtime.frontend.replay import NOTHING, Replay, Said
from runtime.frontend.schemas.compile import ModulePrompt
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReuseParams
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

    def encode(self, submission: Submission, before: Submission | None = None) -> list[int]:
        """Check a submission, fill `submission.diffusion` for a diffusion model, and return the prompt's token ids.

        Does not check a grammar. Thread-safe.

        Args:
            submission: see above.
            before: an encoded submission; if it has the same parameters, they are not checked again.

        Raises:
            InvalidRequest: if the submission can never be served.
        """
        prompt = submission.prompt
        if callable(prompt):
            prompt = submission.prompt = prompt()
        if submission.reuse is not None:
            submission.reuse.check()
        if isinstance(prompt, Segments):
            prompt = submission.prompt = self._place_documents(submission, prompt)
        elif not isinstance(prompt, DocumentPrompt) and isinstance(submission.reuse, ReuseParams):
            refuse_reuse(submission.reuse)
        asked = submission.reuse
        if asked is not None and not isinstance(asked, ReuseParams) and (reason := self._refusal(submission)):
            raise InvalidRequest(f"{asked.method} is not served {reason}", param="reuse")
        if isinstance(prompt, DocumentPrompt) and prompt.ask is not None and (reason := self._exact(submission)):
            raise InvalidRequest(f"documents are not reused {reason}", param="reuse")
        if isinstance(prompt, ModulePrompt):
            return self._check_modules(submission, prompt, before)
        if isinstance(prompt, DocumentPrompt):
            prompt = prompt.tokens
        tokens = self._tokenize(submission, prompt) if isinstance(prompt, str | MarkedText) else prompt
        if submission.last_tokens is not None:
            tokens = self._truncated(tokens, submission)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.check_ids(tokens, "prompt")
        self._check_places(submission, len(tokens))
        self._check_sampling(submission, before)
        start = submission.prompt_logprobs_from
        if start is not None and not 0 <= start < len(tokens):
            raise InvalidRequest(
                f"log-probabilities are wanted from position {start} of a prompt of {len(tokens)} tokens",
                param="prompt_logprobs_from",
            )
        self._clip(submission, len(tokens))
        if self.info.diffusion is not None:
            submission.diffusion = self._denoising(submission, tokens)
            self._check_length(len(tokens), submission.diffusion.gen_length)
            self._check_guidance(len(tokens), submission.diffusion)
            return tokens
        if submission.diffusion is not None:
            raise InvalidRequest("this model is not a diffusion model", param="diffusion")
        self._check_length(len(tokens), submission.sampling.max_new_tokens)
        return tokens

    def _tokenize(self, submission: Submission, prompt: str | MarkedText) -> list[int]:
        """The tokens of a text. Sets the breakpoints of the submission, in tokens."""
        text, keep = (prompt, []) if isinstance(prompt, str) else (prompt.text, prompt.breakpoints)
        self.check_text(len(text), "prompt")
        special = submission.add_special_tokens
        replays = submission.replay and not special and self.info.diffusion is None
        if not (keep or replays):
            return self.tokenizer.encode(text, add_special_tokens=special)
        before = self.replay.find(submission.account, submission.namespace, text) if replays else NOTHING
        start = before.characters
        rest, rest_ends = self.tokenizer.encode_with_ends(text[start:], special)
        tokens, ends = before.tokens + array("i", rest), before.ends + array("i", [start + end for end in rest_ends])
        submission.breakpoints = [(bisect_right(ends, place), ttl_s) for place, ttl_s in keep]
        if replays:
            submission.said = Said(text, tokens, ends, before.sampled, array("i"))
        return tokens.tolist()

    def _check_places(self, submission: Submission, length: int) -> None:
        """Raise InvalidRequest for breakpoints that do not fit a prompt of `length` tokens."""
        if len(submission.breakpoints) > MAX_BREAKPOINTS:
            message = f"a prompt has {MAX_BREAKPOINTS} breakpoints at most, not {len(submission.breakpoints)}"
            raise InvalidRequest(message, param="breakpoints")
        if not all(0 <= place <= length and ttl_s > 0 for place, ttl_s in submission.breakpoints):
            message = "a breakpoint must be within the prompt, and its time to live longer than 0 s"
            raise InvalidRequest(message, param="breakpoints")

    def _truncated(self, tokens: list[int], submission: Submission) -> list[int]:
        """The last tokens of a prompt, see `Submission.last_tokens`. Raises InvalidRequest if it has documents."""
        last = submission.last_tokens
        assert last is not None
        if isinstance(submission.prompt, DocumentPrompt):
            raise InvalidRequest("a prompt with documents cannot be truncated", param="last_tokens")
        if last == -1:
            new = submission.sampling.max_new_tokens
            room = self._room - self._positions(1 if new is None else new)
            last = max(room, 1)
        left_out = max(len(tokens) - last, 0)
        submission.breakpoints = [(max(place - left_out, 0), ttl_s) for place, ttl_s in submission.breakpoints]
        return tokens[left_out:]

    def _check_modules(self, submission: Submission, prompt: ModulePrompt, before: Submission | None) -> list[int]:
        """The tokens of a prompt with modules, without those of the modules. Raises InvalidRequest if not servable."""
        if self.info.diffusion is not None:
            raise InvalidRequest("a diffusion model takes no modules", param="prompt")
        if submission.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs_from")
        self._check_sampling(submission, before)
        pages = self.info.page_size * (len(prompt.rows) + 1)  # that may be partly filled
        self._clip(submission, prompt.length + pages, prompt.stop)
        self._check_length(prompt.length, submission.sampling.max_new_tokens, prompt.stop)
        return prompt.tokens

    def _check_sampling(self, submission: Submission, before: Submission | None) -> None:
        """Set the tokens of bad words; see `encode`."""
        if before is not None and before.common is submission.sampling:
            submission.bad_words = before.bad_words
            return
        submission.sampling.check(self.info.vocab_size)
        submission.bad_words = self._tokens_of_words(submission.sampling.bad_words)

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
        return "with an adapter" if submission.namespace.adapter else None

    def _refusal(self, submission: Submission) -> str | None:
        """Why a submission can have no reuse but that of its prompt's parts; None if it can."""
        prompt = submission.prompt
        if (reason := self._exact(submission)) is not None:
            return reason
        if isinstance(prompt, ModulePrompt) or (isinstance(prompt, DocumentPrompt) and prompt.names):
            return "behind modules or documents"
        return None

    def ask_of(self, submission: Submission) -> ReuseAsk | None:
        """The field `AddRequest.ask` of an encoded submission."""
        asked = submission.reuse
        if asked is None and self._default is not None and self._refusal(submission) is None:
            asked = self._default
        if asked is not None and not isinstance(asked, ReuseParams):
            return asked.ask()
        return submission.prompt.ask if isinstance(submission.prompt, PlacedPrompt) else None

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

    def _clip(self, submission: Submission, prompt: int, positions: int | None = None) -> None:
        """Set the most new tokens to what a prompt of so many tokens leaves, but at least to one.

        `positions`: of the prompt, if they are not its tokens.
        """
        new = submission.sampling.max_new_tokens or 0
        room = min(self.info.context_length - (positions or prompt), self.info.pool_tokens - prompt)
        most = max(min(room // self._canvas * self._canvas, self.config.max_output_tokens or room), 1)
        if new > most:
            least = min(submission.sampling.min_new_tokens, most)
            clipped = {"max_new_tokens": most, "min_new_tokens": least}
            submission.unclipped = submission.sampling
            submission.sampling = submission.sampling.model_copy(update=clipped)
            submission.otherwise = submission.otherwise and submission.otherwise.model_copy(update=clipped)

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

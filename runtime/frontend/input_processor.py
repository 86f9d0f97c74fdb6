"""Checks and tokenizes submissions. Submissions that can never be served are refused."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from msgspec.structs import replace

from runtime.asks import ReuseAsk
from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest
from runtime.frontend.lengths import Lengths
from runtime.frontend.output import (
    MAX_BREAKPOINTS,
    Encoded,
    MarkedText,
    PartedPrompt,
    Prompt,
    Submission,
    UnplacedPrompt,
)
from runtime.frontend.preparer import Preparer
from runtime.frontend.replay import NOTHING, EarlierAnswer, Replay
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import ModelInfo


class InputProcessor:
    """Checks and tokenizes submissions.

    Args:
        info: the loaded model.
        tokenizer: the model's tokenizer.
        config: limits on lengths and on open requests.
        preparers: what features do to submissions; without them, prompts are texts or tokens.
        default: what requests that say nothing ask of reuse, where it is possible.

    Attributes:
        lengths: how long prompts and outputs may be.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        preparers: Sequence[Preparer] = (),
        default: ReuseAsk | None = None,
    ):
        self.info, self.tokenizer = info, tokenizer
        self.config, self.preparers, self._default = config, preparers, default
        self.lengths = Lengths(info, config, max((one.granule for one in preparers), default=1))
        self.replay = Replay(tokenizer)

    def encode(self, submission: Submission, before: Encoded | None = None) -> Encoded:
        """Check and tokenize a submission. Thread-safe.

        Args:
            submission: see above.
            before: another submission; if it had the same parameters, they are not checked again.

        Raises:
            InvalidRequest: if the submission can never be served.
        """
        encoded = self._with_tokens(self._with_prompt(submission), before)
        return replace(encoded, ask=self._ask_of(encoded))

    async def settle(self, encoded: Encoded) -> Encoded:
        """An encoded submission after checks that take long. Raises InvalidRequest if it can never be served."""
        for preparer in self.preparers:
            encoded = await preparer.settle(encoded)
        return encoded

    def _with_prompt(self, submission: Submission) -> Encoded:
        """The submission with its prompt, whose parts are placed. Checks whether what it reuses can be reused."""
        prompt = submission.prompt() if callable(submission.prompt) else submission.prompt
        if submission.images and (reason := self._no_images(submission, prompt)):
            raise InvalidRequest(f"images are not served {reason}", param=submission.images.param)
        if submission.reuse is not None:
            submission.reuse.check()
        if isinstance(prompt, UnplacedPrompt):
            self.check_text(prompt.num_characters, "prompt")
        exact = self._why_exact(submission)
        for preparer in self.preparers:
            prompt = preparer.place(submission, prompt, exact)
        encoded, asked = Encoded.of(submission, prompt), submission.reuse
        if asked is not None and asked.ask() is not None and (reason := self._why_none(encoded)):
            raise InvalidRequest(f"{asked.method} is not served {reason}", param="reuse")
        return encoded

    def _with_tokens(self, submission: Encoded, before: Encoded | None) -> Encoded:
        """The submission with all that `encode` fills in but the ask."""
        said, breakpoints, prompt, parted = None, submission.breakpoints, submission.prompt, submission.parted
        if isinstance(prompt, str | MarkedText):
            tokens, breakpoints, said = self._tokenize(submission, prompt)
        else:
            assert isinstance(prompt, PartedPrompt | list), "a `Preparer` has placed it"
            tokens = prompt if isinstance(prompt, list) else prompt.tokens
        if submission.last_tokens is not None:
            tokens, breakpoints = self._truncated(tokens, breakpoints, submission)
        length, positions, pages = len(tokens), len(tokens), 0
        if parted is not None:
            length, positions, pages = parted.length, parted.positions, parted.partial_pages
        if not length:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if submission.images:
            submission.images.place(tokens)
        self.check_ids([token for token in tokens if token >= 0] if submission.images else tokens, "prompt")
        self._check_places(breakpoints, length)
        self._check_logprobs(submission.prompt_logprobs_from, len(tokens), parted)
        submission = self._with_sampling(submission, before, length + pages * self.info.page_size, positions)
        data = array("i", tokens).tobytes()
        submission = replace(submission, tokens=data, breakpoints=breakpoints, said=said)
        for preparer in self.preparers:
            submission = preparer.fill(submission, tokens, self.lengths)
        if self.info.decoding is None:
            self.lengths.check(length, submission.sampling.max_new_tokens, positions)
        return submission

    def _tokenize(
        self, submission: Submission, prompt: str | MarkedText
    ) -> tuple[list[int], list[tuple[int, float]], EarlierAnswer | None]:
        """The tokens of a text, its breakpoints in tokens, and what its answer's replay needs; None: no replay."""
        text, keep = (prompt, []) if isinstance(prompt, str) else (prompt.text, prompt.breakpoints)
        self.check_text(len(text), "prompt")
        special, encoder = submission.add_special_tokens, submission.images or self.tokenizer
        replays = submission.replay and not special and self.info.decoding is None
        if not (keep or replays):
            return encoder.encode(text, add_special_tokens=special), submission.breakpoints, None
        before = self.replay.find(submission.account, submission.namespace, text) if replays else NOTHING
        start = before.characters
        if submission.images:
            submission.images.read(text[:start])
        rest, rest_ends = encoder.encode_with_ends(text[start:], special)
        tokens, ends = before.tokens + array("i", rest), before.ends + array("i", [start + end for end in rest_ends])
        said = EarlierAnswer(text, tokens, ends, before.sampled, array("i")) if replays else None
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

        Raises InvalidRequest if the prompt has parts.
        """
        last = submission.last_tokens
        assert last is not None
        if isinstance(submission.prompt, PartedPrompt):
            raise InvalidRequest(f"a prompt with {submission.prompt.noun} cannot be truncated", param="last_tokens")
        if last == -1:
            last = self.lengths.most_prompt(submission.sampling.max_new_tokens)
        left_out = max(len(tokens) - last, 0)
        return tokens[left_out:], [(max(place - left_out, 0), ttl_s) for place, ttl_s in breakpoints]

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

    def _check_logprobs(self, start: int | None, tokens: int, parted: PartedPrompt | None) -> None:
        """Raise InvalidRequest if a prompt with so many tokens of its own has no log-probabilities from `start` on."""
        if start is None:
            return
        if parted is not None and parted.length != tokens:
            raise InvalidRequest(f"prompts with {parted.noun} have no log-probabilities", param="prompt_logprobs_from")
        if not 0 <= start < tokens:
            message = f"log-probabilities are wanted from position {start} of a prompt of {tokens} tokens"
            raise InvalidRequest(message, param="prompt_logprobs_from")

    def _why_exact(self, submission: Submission) -> str | None:
        """Why a submission must be computed exactly, without approximate reuse; None if it need not be."""
        for preparer in self.preparers:
            if reason := preparer.why_exact(submission):
                return reason
        if submission.prompt_logprobs_from is not None:
            return "where log-probabilities of the prompt are wanted"
        if submission.images:
            return "with images"
        return "with an adapter" if submission.namespace.adapter else None

    def _no_images(self, submission: Submission, prompt: Prompt) -> str | None:
        """Why a submission of a prompt cannot have images; None if it can."""
        if isinstance(prompt, UnplacedPrompt | PartedPrompt):
            return f"beside {prompt.noun}"
        if isinstance(prompt, list):
            return "with token ids"
        if submission.last_tokens is not None:
            return "in a prompt that is truncated"
        return None if submission.prompt_logprobs_from is None else "with log-probabilities of the prompt"

    def _why_none(self, submission: Encoded) -> str | None:
        """Why a submission can have no reuse but that of its prompt's parts; None if it can."""
        if reason := self._why_exact(submission):
            return reason
        parted = submission.parted
        return f"behind {parted.noun}" if parted and parted.has_parts else None

    def _ask_of(self, submission: Encoded) -> ReuseAsk | None:
        asked: ReuseAsk | None = None if submission.reuse is None else submission.reuse.ask()
        if submission.reuse is None and self._default is not None and self._why_none(submission) is None:
            asked = self._default
        return asked if asked is not None or submission.parted is None else submission.parted.ask

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

    def _with_sampling(self, submission: Encoded, before: Encoded | None, prompt: int, positions: int) -> Encoded:
        """Check the sampling parameters. The most new tokens become what such a prompt leaves, but at least one.

        Args:
            submission: see above.
            before: see `encode`.
            prompt: number of tokens whose KV the prompt has in the pool.
            positions: number of the prompt's positions.
        """
        sampling, otherwise = submission.sampling, submission.otherwise
        bad_words = self._bad_words(sampling, before)
        if (sampling.max_new_tokens or 0) > (most := self.lengths.left(prompt, positions)):
            clipped = {"max_new_tokens": most, "min_new_tokens": min(sampling.min_new_tokens, most)}
            sampling = sampling.model_copy(update=clipped)
            otherwise = otherwise and otherwise.model_copy(update=clipped)
        return replace(submission, sampling=sampling, otherwise=otherwise, bad_words=bad_words)

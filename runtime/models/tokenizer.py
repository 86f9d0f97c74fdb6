"""Tokenization, detokenization and chat templates, without torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as FastTokenizer

from runtime.errors import InvalidRequest, ModelError, RametError
from runtime.models.added_tokens import NAMES, add_missing, end_ids, named, read_config, text_of
from runtime.models.marks import cut, new_place
from runtime.models.templates import PROCESSES

log = logging.getLogger(__name__)

# In tokenizer_config.json: the chat template was made up, because the model has none.
PLAIN_TEMPLATE = "has_plain_chat_template"

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Most tokens of an incomplete UTF-8 character: it has at most three bytes.
_INCOMPLETE = 3
# Longer decodes take milliseconds, so they release the interpreter lock.
_LONG = 4096


class _NoPanic:
    """Turns a panic of the tokenizers library, which is no Exception, into a RametError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise RametError("the tokenizer failed") from None


_no_panic = _NoPanic()


class Tokenizer:
    """A tokenizer and the chat template that belongs to it. Thread-safe."""

    def __init__(self, fast: FastTokenizer, config: dict[str, Any], chat_template: str | None):
        self._fast = fast
        self._config = config
        self.chat_template = chat_template
        # Returns the text of one token, also for special tokens.
        self.token_text: Callable[[int], str] = _TokenTexts(self).__getitem__

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a model directory.

        Args:
            directory: has tokenizer.json (or a sentencepiece tokenizer.model) and tokenizer_config.json.
            chat_template: a Jinja file that replaces the model's own template.

        Raises:
            ModelError: if the tokenizer is missing or cannot be read.
        """
        config = read_config(directory)
        fast = _load_fast(directory, config)
        # A tokenizer.json may contain truncation and padding settings of a training run.
        fast.no_truncation()
        fast.no_padding()
        _apply_bos_eos(fast, config)
        tokenizer = cls(fast, config, _find_template(directory, config, chat_template))
        if config.get(PLAIN_TEMPLATE) and chat_template is None:
            log.warning("this model has no chat template, so chats get a plain one; --chat-template gives another")
        if chat_template is not None:
            try:  # report a broken template at the start, not for each chat
                PROCESSES.render(tokenizer.chat_template or "", None)
            except InvalidRequest as error:
                raise ModelError(f"--chat-template {chat_template}: {error.message}") from None
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds the model's BOS, if it has one."""
        with _no_panic:
            # Unlike the library's `encode`, this releases the interpreter lock; megabytes take seconds.
            return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_with_ends(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Like `encode`, and for each token the number of characters up to its end."""
        with _no_panic:
            encoding = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return encoding.ids, list(accumulate((end for _, end in encoding.offsets), max))

    def encode_each(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, encoded separately and without BOS."""
        with _no_panic:
            return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        with _no_panic:
            if len(ids) > _LONG:  # a batch releases the interpreter lock
                return self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token: int) -> str | None:
        return self._fast.id_to_token(token)

    def token_to_id(self, token: str) -> int | None:
        return self._fast.token_to_id(token)

    def to_json(self) -> str:
        return self._fast.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return self._fast.get_vocab_size()

    @cached_property
    def longest_token(self) -> int:
        """Length in characters of the longest token in the vocabulary."""
        return max(map(len, self._fast.get_vocab()), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that `skip_special_tokens` skips."""
        return frozenset(i for i, t in self._fast.get_added_tokens_decoder().items() if t.special)

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        """The texts of tokens that `encode` cuts out of a text before it looks for others."""
        return tuple(token.content for token in self._fast.get_added_tokens_decoder().values())

    @cached_property
    def leading_ids(self) -> list[int]:
        """The tokens that `encode` puts before a text: the model's BOS, if it has one."""
        text, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        return next(whole[:i] for i in range(len(whole)) if whole[i : i + len(text)] == text)

    @cached_property
    def placeholder(self) -> int:
        """The token that stands for text which is not known yet: the unknown token, otherwise a space.

        Byte-level tokenizers have no unknown token. The `unk_token` in their configuration usually is the end-of-text
        token, which the model would read as the start of a new document.
        """
        unknown = getattr(self._fast.model, "unk_token", None)
        token = None if unknown is None else self.token_to_id(unknown)
        return self.encode(" ", add_special_tokens=False)[-1] if token is None else token

    def describe(self) -> dict[str, Any]:
        """The fields of tokenizer_config.json, with special tokens as texts, and the chat template."""
        names = {name: value for name, value in self._config.items() if name not in NAMES}
        missing = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
        return {**names, **missing, **self._token_names(), "chat_template": self.chat_template}

    # -- chat ------------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, including special tokens (encode it with `add_special_tokens=False`).

        `variables`: further template variables, such as `enable_thinking`; they do not override other arguments.

        Raises:
            InvalidRequest: if the model has no template, or the template takes too long.
            TemplateRefused: if the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions, or start with --chat-template")
        variables = variables or {}
        values = {
            **self._token_names(),
            "documents": None,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return PROCESSES.render(self.chat_template, values)

    @cached_property
    def system_turns(self) -> Literal["anywhere", "first", "nowhere"]:
        """Where the chat template writes a system message in its place."""

        def writes(*roles: str) -> bool:
            marks = [new_place() for _ in roles]
            turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            try:
                return cut(self.apply_chat_template(turns), marks) is not None
            except InvalidRequest:
                return False

        if not writes("system", "user"):
            return "nowhere"
        return "anywhere" if writes("system", "user", "system", "assistant", "system", "user") else "first"

    def _token_names(self) -> dict[str, str]:
        """The named special tokens. Missing ones stay undefined, because templates check whether they are defined."""
        return named(self._config)


class _TokenTexts(dict[int, str]):
    """A cache of the texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


class Detokenizer:
    """Incremental text of a token sequence, in whole characters.

    Each `push` decodes only the tokens since the last shown text, with the tokens of that text as context. All pieces
    together equal `Tokenizer.decode` of all tokens, except for invalid UTF-8 in byte tokens: `decode` replaces the
    whole run of byte tokens, but its valid beginning may be shown already.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, ids: list[int]) -> str:
        """Add tokens; returns the new text, which never ends within a UTF-8 character."""
        # Tokens without text are dropped; otherwise they would stay in the window forever.
        text_of, name_of = self._tokenizer.token_text, self._tokenizer.id_to_token
        self._ids += [i for i in ids if i not in self._skip and (text_of(i) or name_of(i) is not None)]
        before, text = self._window(self._shown), self._window(len(self._ids))
        if not text.endswith(_REPLACEMENT) or self._ends_with_literal():
            return self._show(len(self._ids), text[len(before) :])
        # Only the last tokens may be part of an incomplete character.
        for end in range(len(self._ids) - _INCOMPLETE, self._shown, -1):
            settled = self._window(end)
            if text.startswith(settled):
                return self._show(end, settled[len(before) :])
        return ""

    def _ends_with_literal(self) -> bool:
        """Whether the last tokens spell U+FFFD itself, which else stands for an incomplete character."""
        ends = (self._ids[-count:] for count in range(1, _INCOMPLETE + 1))
        return any(self._tokenizer.encode(self._tokenizer.decode(end, False), False) == end for end in ends)

    def flush(self) -> str:
        """Call after the last token: returns the text that `push` has held back."""
        before, text = self._window(self._shown), self._window(len(self._ids))
        self._context = self._shown = len(self._ids)
        return text[len(before) :]

    def _window(self, end: int) -> str:
        ids = self._ids[self._context : end]
        return self._tokenizer.token_text(*ids) if len(ids) == 1 else self._tokenizer.decode(ids, False)

    def _show(self, end: int, text: str) -> str:
        if text:
            self._context, self._shown = self._shown, end
        return text


class Offsets:
    """Where tokens begin in their text, in characters. A token that begins within a character has its place."""

    def __init__(self, tokenizer: Tokenizer):
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self._length = 0

    def push(self, token: int, is_shown: bool = True) -> int:
        """Add a token; returns its place. One that is not shown is not in the text."""
        before = self._length
        self._length += len(self._detokenizer.push([token])) if is_shown else 0
        return before


def ends_of_turns(directory: Path) -> tuple[int, ...]:
    """Ids of the tokens that end a turn by their names in a model's tokenizer_config.json. Raises ModelError."""
    config = read_config(directory)
    return end_ids(_load_fast(directory, config), config)


def _load_fast(directory: Path, config: dict[str, Any]) -> FastTokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(f"{path} cannot be read: {error}") from None
        add_missing(fast, config, directory)
        return fast
    if not (directory / "tokenizer.model").exists():
        raise ModelError(f"{directory} has no tokenizer.json and no tokenizer.model")
    # For old checkpoints only, as transformers takes seconds to import.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except Exception as error:
        raise ModelError(f"{directory / 'tokenizer.model'} cannot be converted: {error}") from None


def _apply_bos_eos(fast: FastTokenizer, config: dict[str, Any]) -> None:
    """Add the BOS or EOS of tokenizer_config.json, if tokenizer.json's post-processor does not."""
    from tokenizers.processors import TemplateProcessing

    if fast.post_processor is not None and "Template" in type(fast.post_processor).__name__:
        return
    names = {}
    for kind in ("bos", "eos"):
        text = text_of(config.get(f"{kind}_token"))
        if config.get(f"add_{kind}_token") and text and fast.token_to_id(text) is not None:
            names[kind] = text
    if names and fast.post_processor is None:
        single = " ".join(
            ([names["bos"]] if "bos" in names else []) + ["$A"] + ([names["eos"]] if "eos" in names else [])
        )
        fast.post_processor = TemplateProcessing(
            single=single, special_tokens=[(text, fast.token_to_id(text)) for text in names.values()]
        )


def _find_template(directory: Path, config: dict[str, Any], given: Path | None) -> str | None:
    if given is not None:
        try:
            return given.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ModelError(f"--chat-template {given} cannot be read: {reason}") from None
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if not isinstance(template, str | None):
        raise ModelError(f"{directory / 'tokenizer_config.json'}: chat_template is no text")
    return template

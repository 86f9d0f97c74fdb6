"""Finds the dialect of a model."""

from functools import lru_cache
from importlib import import_module

from runtime.models.tokenizer import Tokenizer
from server.openai.dialects.dialect import OPEN, Dialect
from server.openai.dialects.json_objects import WHOLE
from server.openai.dialects.tagged import TAGGED

# Module and name, by a text in the chat template, or a token of the vocabulary. Those of other models are not imported.
_DIALECTS = {
    "<|channel|>": ("tagged", "HARMONY"),
    "<|tool_call>": ("gemma", "GEMMA"),
    "<|tool_call_start|>": ("lfm2", "LFM2"),
    "[TOOL_CALLS]": ("mistral", "MISTRAL"),
    "<｜tool▁calls▁begin｜>": ("deepseek", "DEEPSEEK"),
    "<minimax:tool_call>": ("xml", "MINIMAX"),
    "<seed:tool_call>": ("xml", "SEED"),
    "<TOOLCALL>": ("tagged", "UPPER"),
    "<function=": ("tagged", "ELEMENTS"),
    "<arg_key>": ("tagged", "KEYS"),
}


@lru_cache(maxsize=8)
def writes_special(tokenizer: Tokenizer) -> bool:
    """Whether the model's tags are special tokens, which texts otherwise lack."""
    dialect, special = dialect_of(tokenizer), {tokenizer.token_text(token) for token in tokenizer.special_ids}
    tags = [tag for pair in (*dialect.tags, dialect.thoughts) for tag in pair if tag]
    return dialect.is_harmony or any(mark in tag for tag in tags for mark in special)


@lru_cache(maxsize=8)
def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """The dialect of a model. If its chat template does not support tools, `render_chat` asks for JSON between tags."""
    template = tokenizer.chat_template or ""
    if "tools" not in template:
        return TAGGED
    if found := next((sign for sign in _DIALECTS if sign in template), None):
        return _import(found)
    if OPEN in template:
        return TAGGED
    # Some templates write no calls, so the model's tokens tell.
    found = next((sign for sign in _DIALECTS if sign in tokenizer.added_texts), None)
    return _import(found) if found else WHOLE


def _import(sign: str) -> Dialect:
    module, name = _DIALECTS[sign]
    dialect: Dialect = getattr(import_module(f"server.openai.dialects.{module}"), name)
    return dialect

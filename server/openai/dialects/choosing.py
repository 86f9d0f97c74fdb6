"""Finds the dialect of a model."""

from functools import lru_cache

from runtime.models.tokenizer import Tokenizer
from server.openai.dialects.deepseek import DEEPSEEK
from server.openai.dialects.dialect import OPEN, Dialect
from server.openai.dialects.gemma import GEMMA
from server.openai.dialects.json_objects import WHOLE
from server.openai.dialects.lfm2 import LFM2
from server.openai.dialects.mistral import MISTRAL
from server.openai.dialects.tagged import ELEMENTS, HARMONY, KEYS, TAGGED, UPPER
from server.openai.dialects.xml import MINIMAX, SEED

# By a text in the chat template, or a token of the vocabulary.
_DIALECTS = {
    "<|channel|>": HARMONY,
    "<|tool_call>": GEMMA,
    "<|tool_call_start|>": LFM2,
    "[TOOL_CALLS]": MISTRAL,
    "<｜tool▁calls▁begin｜>": DEEPSEEK,
    "<minimax:tool_call>": MINIMAX,
    "<seed:tool_call>": SEED,
    "<TOOLCALL>": UPPER,
    "<function=": ELEMENTS,
    "<arg_key>": KEYS,
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
    for sign, dialect in _DIALECTS.items():
        if sign in template:
            return dialect
    if OPEN in template:
        return TAGGED
    # Some templates write no calls, so the model's tokens tell.
    return next((dialect for sign, dialect in _DIALECTS.items() if sign in tokenizer.added_texts), WHOLE)

"""Tokens that stand outside of tokenizer.json, in the places and the order in which transformers looks for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from runtime.errors import ModelError
from runtime.models.config_json import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
# Names of tokens that end a turn.
_ENDS = ("eos_token", "eot_token", "eom_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json if it lists no tokens by id. Raises ModelError."""
    path, older = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    config = read_json(path) if path.exists() else {}
    for name in NAMES:
        value = config.get(name)
        if not isinstance(value.get("content") if isinstance(value, dict) else value, str | None):
            raise ModelError(f"{path}: {name} is no text")
    return config if "added_tokens_decoder" in config or not older.exists() else config | read_json(older)


def text_of(token: Any) -> str | None:
    """The text of a token, which may be a dict; None if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def named(config: dict[str, Any]) -> dict[str, str]:
    """The texts of all tokens with a name, those of the model's own kinds included."""
    extra = next((found for key in _EXTRA if isinstance(found := config.get(key), dict)), {})
    own = {key: value for key, value in config.items() if key.endswith("_token") and not key.startswith("add_")}
    values = {**dict.fromkeys(NAMES), **own, **extra}
    return {key: text for key, value in values.items() if (text := text_of(value)) is not None}


def end_ids(fast: FastTokenizer, config: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end a turn by their names."""
    texts = [text for name, text in named(config).items() if name in _ENDS]
    return tuple(dict.fromkeys(id for text in texts if (id := fast.token_to_id(text)) is not None))


def add_missing(fast: FastTokenizer, config: dict[str, Any], directory: Path) -> None:
    """Add the tokens that tokenizer.json lacks; a model has no ids beyond its vocabulary. Raises ModelError."""
    model = read_json(directory / "config.json") if (directory / "config.json").exists() else {}
    text = model.get("text_config") if isinstance(model.get("text_config"), dict) else model
    most = text.get("vocab_size") if isinstance(text, dict) else None
    tokens = list(_listed(config, directory))
    known = {token.content for token in (*fast.get_added_tokens_decoder().values(), *tokens)}
    special = dict.fromkeys([*named(config).values(), *(text for token in _extra(config) if (text := text_of(token)))])
    flags = {text_of(token): token for token in (*config.values(), *_extra(config)) if isinstance(token, dict)}
    tokens += [_token(flags.get(text, text), special=True) for text in special if text not in known]
    for token in tokens:
        room = not isinstance(most, int) or fast.get_vocab_size() < most
        if room or fast.token_to_id(token.content) is not None:
            fast.add_tokens([token])


def _listed(config: dict[str, Any], directory: Path) -> Iterator[AddedToken]:
    """The tokens that are listed with their ids, by id."""
    listed, path = config.get("added_tokens_decoder"), directory / "added_tokens.json"
    if listed is None:
        older = read_json(path) if path.exists() else {}
        special = {*named(config).values(), *map(text_of, _extra(config))}
        listed = {
            id: {"content": text, "special": text in special, "normalized": text not in special}
            for text, id in older.items()
        }
    try:
        return iter([_token(listed[id]) for id in sorted(listed, key=int)])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the added tokens of {directory} cannot be read: {error}") from None


def _extra(config: dict[str, Any]) -> list[Any]:
    lists = [found for key in _EXTRA if isinstance(found := config.get(key), list)]
    return lists[0] if lists else []


def _token(given: Any, **more: bool) -> AddedToken:
    flags = {name: bool(given[name]) for name in _FLAGS if name in given} if isinstance(given, dict) else {}
    flags |= more
    return AddedToken(given["content"] if isinstance(given, dict) else given, **flags)

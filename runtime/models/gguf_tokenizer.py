"""Tokenizers of GGUF files, rebuilt with the `tokenizers` library."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# SentencePiece's spelling of a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "lfm2")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Marks belong to the letters before them.
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")

# Words also end between lower and upper case.
_START, _END = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    f"{_START}{_UPPER}*{_LOWER}+{_END}{_START}{_UPPER}+{_LOWER}*{_END}"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(path: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a GGUF file, and its tokenizer_config.json. Raises ModelError for unsupported kinds."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path.name} has no tokenizer")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        fast = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        fast = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(f"{path.name}: tokenizer {kind!r}; supported in GGUF are 'gpt2' and 'llama'")
    types = metadata.get("tokenizer.ggml.token_type") or []
    # One call for each kind, because every call rebuilds the index of added tokens.
    for wanted, add in ((_CONTROL, fast.add_special_tokens), (_USER_DEFINED, fast.add_tokens)):
        found = (token for token, token_type in zip(tokens, types, strict=False) if token_type == wanted)
        add([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in found])
    return fast, _settings(metadata, tokens, fast, kind)


def _byte_level(path: Path, metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        fast = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3_NAMES))
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"{path.name}: the tokenizer's merges do not fit its tokens: {error}") from None
    fast.pre_tokenizer = _pre_tokenizer(path, pre)
    if pre in (*_QWEN2_NAMES, "qwen35"):
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return plain
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    patterns = dict.fromkeys((*_LLAMA3_NAMES, "dbrx"), _LLAMA3) | dict.fromkeys(_QWEN2_NAMES, _QWEN2)
    patterns |= {"qwen35": _QWEN35, "gpt-4o": _GPT4O}
    if name not in patterns:
        known = ", ".join(["gpt-2", "default", "smollm", *patterns])
        raise ModelError(f"{path.name}: pre-tokenizer {name!r}; supported in GGUF are {known}")
    split = pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: merges ordered by the score of their result, with byte fallback."""
    from transformers.tokenization_utils_base import generate_merges

    vocab = {token: i for i, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    # Text never encodes to a byte or control token.
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    fast = Tokenizer(
        models.BPE(vocab, generate_merges(vocab, normal), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", _SPACE)
    prepends = metadata.get("tokenizer.ggml.add_space_prefix", True)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prepends else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepends else steps)
    return fast


def _settings(metadata: dict[str, Any], tokens: list[str], fast: Tokenizer, kind: str) -> dict[str, Any]:
    """The contents of tokenizer_config.json. Also makes the tokenizer's post-processor add the BOS."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if token is not None and 0 <= token < len(tokens):
            settings[f"{name}_token"] = tokens[token]
    bos = settings.get("bos_token")
    # For these two kinds, llama.cpp adds a BOS unless the file says otherwise.
    implied = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    if bos and metadata.get("tokenizer.ggml.add_bos_token", implied):
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fast.token_to_id(bos))]
        )
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings

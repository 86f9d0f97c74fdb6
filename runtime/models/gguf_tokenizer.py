"""Tokenizers of GGUF files, rebuilt with the `tokenizers` library."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from runtime.errors import ModelError
from runtime.models.pre_tokenizers import Cuts, cuts_of
from runtime.models.tokenizer import PLAIN_TEMPLATE

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# SentencePiece's spelling of a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

# Forms of a chat for files without a template: ChatML where the vocabulary has its tags, else names and colons.
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NAMES = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
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
        fast = _sentencepiece(path, metadata, tokens)
    else:
        raise ModelError(f"{path.name}: tokenizer {kind!r}; supported in GGUF are 'gpt2' and 'llama'")
    types = metadata.get("tokenizer.ggml.token_type") or []
    # One call for each kind, because every call rebuilds the index of added tokens.
    for wanted, add in ((_CONTROL, fast.add_special_tokens), (_USER_DEFINED, fast.add_tokens)):
        found = (token for token, token_type in zip(tokens, types, strict=False) if token_type == wanted)
        add([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in found])
    # A file that does not say whether prompts begin with the BOS leaves it to its kind.
    begins = kind == "llama" or _cuts(path.name, metadata).begins
    return fast, _settings(metadata, tokens, fast, metadata.get("tokenizer.ggml.add_bos_token", begins))


def _byte_level(path: Path, metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    cuts = _cuts(path.name, metadata)
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        fast = Tokenizer(models.BPE(vocab, merges, ignore_merges=cuts.whole))
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"{path.name}: the tokenizer's merges do not fit its tokens: {error}") from None
    fast.pre_tokenizer = cuts.build()
    if cuts.composed:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast


def _cuts(file: str, metadata: dict[str, Any]) -> Cuts:
    return cuts_of(file, metadata.get("tokenizer.ggml.pre", "default"))


def _sentencepiece(path: Path, metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: merges ordered by the score of their result, with byte fallback."""
    from transformers.tokenization_utils_base import generate_merges

    vocab = {token: i for i, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not len(tokens) == len(scores) == len(types):
        counts = f"{len(tokens)} tokens, {len(scores)} scores and {len(types)} token types"
        raise ModelError(f"{path.name}: the tokenizer has {counts}; there must be one of each for a token")
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


def _settings(metadata: dict[str, Any], tokens: list[str], fast: Tokenizer, begins: bool) -> dict[str, Any]:
    """The contents of tokenizer_config.json. With `begins`, the tokenizer's post-processor also adds the BOS."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if token is not None and 0 <= token < len(tokens):
            settings[f"{name}_token"] = tokens[token]
    if begins and (bos := settings.get("bos_token")):
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fast.token_to_id(bos))]
        )
    if template := metadata.get("tokenizer.chat_template"):
        return settings | {"chat_template": template}
    has_tags = fast.token_to_id("<|im_start|>") is not None and fast.token_to_id("<|im_end|>") is not None
    return settings | {"chat_template": _CHATML if has_tags else _NAMES, PLAIN_TEMPLATE: True}

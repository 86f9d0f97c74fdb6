"""Token counts by a tokenizer of the user, for servers that do not report them."""

from collections.abc import Sequence
from pathlib import Path


class TokenCounter:
    """Counts with a `tokenizer.json`, or with that of a directory. Raises ValueError for anything else."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"the tokenizer {path} cannot be read: {error}") from None

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without special tokens."""
        return [len(encoded.ids) for encoded in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

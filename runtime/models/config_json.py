"""Reading of config.json and generation_config.json."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import ModelError


class Unsupported(ModelError):
    """A model that Ramet's own code cannot compute, but transformers' code perhaps can."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError."""
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; a model directory needs config.json, safetensors and a tokenizer"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in the content of the file `path`. Raises ModelError."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def architecture_of(config: dict[str, Any]) -> str:
    """The first architecture that a configuration names. Raises ModelError."""
    named = config.get("architectures") or ["(none named)"]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ModelError(f"config.json has architectures {named!r}; it must be a list of names")
    return named[0]


def read_generation(directory: Path) -> dict[str, Any]:
    """`generation_config.json`; empty if there is none. Raises ModelError."""
    path = directory / "generation_config.json"
    return read_json(path) if path.exists() else {}


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn what goes wrong where the configuration of the file `path` is read into ModelError."""
    try:
        yield
    except KeyError as error:
        raise ModelError(f"{path} has no {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path} has a value of the wrong kind: {error}") from None


def positive_size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of the configuration; with a default, null counts as absent."""
    value = config[name] if default is None else config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json has {name} {value!r}; it must be a positive integer")
    return value


def token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """The distinct ids of several configuration values, each an id, a list or None. Raises ModelError."""
    found: list[int] = []
    for value in values:
        found.extend([] if value is None else value if isinstance(value, list) else [value])
    if bad := [each for each in found if not isinstance(each, int)]:
        raise ModelError(f"the model's eos_token_id is {bad[0]!r}; it must be an integer, or a list of integers")
    return tuple(dict.fromkeys(found))

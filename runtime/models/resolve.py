"""Resolution of `--model` to a local model directory."""

import hashlib
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from runtime.config import DEFAULT_MODEL, ModelConfig, default_cache_dir
from runtime.errors import ModelError
from runtime.models.adapters import ADAPTERS
from runtime.models.default_model import fetch_default
from runtime.models.publishing import FORMAT, provide

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
# Other formats of the same weights: subdirectories (onnx, original) and Mistral's own layout.
_HUB_IGNORED = ["*/*", "consolidated*"]


def resolve_model(config: ModelConfig) -> Path:
    """The model directory of `--model`. The first call fetches or converts the model.

    Raises:
        ModelError: if the model cannot be found, fetched or converted.
    """
    name = config.model
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _from_file(path, default_cache_dir(), config.model_impl != "transformers")
    if name == DEFAULT_MODEL:
        return fetch_default(default_cache_dir())
    if name in ADAPTERS:
        # Imports torch, which the server process must not load.
        from runtime.models.adapters.merge import build_adapted

        return build_adapted(name, default_cache_dir())
    return _from_hub(name, config)


def check_name(name: str) -> None:
    """Raise ModelError if `--model` names no directory, GGUF file or short name, and cannot be a model of the hub."""
    path, short = Path(name).expanduser(), (DEFAULT_MODEL, *ADAPTERS)
    if path.is_file():
        from runtime.models.gguf_tensors import is_gguf

        if not is_gguf(path):
            raise ModelError(f"--model {path} is a file, but not GGUF; a model directory or a GGUF file is needed")
    if path.is_dir() or path.is_file() or name in short:
        return
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf" or name.count("/") != 1:
        # The first part of a short name stands for it: smolm2 means smollm2-135m-instruct.
        near = {other.name: str(other) for other in _siblings(path)}
        near |= {text.partition("-")[0]: text for text in reversed(short)} | {text: text for text in short}
        meant = [near[text] for text in get_close_matches(path.name, near, 1)]
        raise ModelError(
            f"--model {name}: no such directory or file, and not the name of a model on the hub (org/name) "
            f"nor a short name ({', '.join(short)})" + (f"; did you mean {meant[0]}?" if meant else "")
        )


def _siblings(path: Path) -> list[Path]:
    """Directories and GGUF files in the same directory as a path, of at most 1,000 entries."""
    try:
        others = [other for other in islice(path.parent.iterdir(), 1000) if other.suffix == ".gguf" or other.is_dir()]
        return [path.with_name(other.name) for other in others]
    except (OSError, ValueError):
        return []


def model_name(config: ModelConfig, path: Path) -> str:
    """The default name of the model for clients."""
    if names := served_names(config):
        return names[0]
    given = Path(config.model).expanduser()
    if given.is_file():
        from runtime.models.gguf_tensors import name_without_part

        return name_without_part(given)
    return path.resolve().name if given.is_dir() else config.model


def served_names(config: ModelConfig) -> list[str]:
    """The names in `--served-model-name`, which `/v1/models` lists."""
    return [name for name in _given_names(config) if name != "*"]


def serves_any_name(config: ModelConfig) -> bool:
    """Whether requests may use any name: `--served-model-name` contains `*`."""
    return "*" in _given_names(config)


def _given_names(config: ModelConfig) -> list[str]:
    return [name for part in (config.served_model_name or "").split(",") if (name := part.strip())]


def known_names(config: ModelConfig) -> list[str]:
    """All names that requests may use: the listed ones, the path or hub name, and its last part."""
    return [*served_names(config), config.model, Path(config.model).name]


def _from_file(path: Path, cache_dir: Path, linked: bool) -> Path:
    from runtime.models.gguf_tensors import name_without_part, parts_of

    def make(work: Path) -> None:
        from runtime.models.gguf import convert_gguf

        convert_gguf(path, work, linked)

    parts = [part for part in parts_of(path) if part.exists()]
    states = [(part.resolve(), part.stat()) for part in parts]
    identity = "\n".join(f"{file}\n{state.st_size}\n{state.st_mtime_ns}" for file, state in states)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f"{name_without_part(path)}-{digest}{'-link' if linked else ''}-{FORMAT}"
    return provide(cache_dir / "models" / name, make)


def _from_hub(name: str, config: ModelConfig) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    # HTTPError belongs to the HTTP client of the installed huggingface-hub (httpx or httpx2).
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.logging import disable_propagation

    from runtime.models.implementation import own_spec

    disable_propagation()  # the hub prints its warnings itself
    try:
        # The configuration first, so that an unsupported model is refused before gigabytes are fetched.
        own_spec(config, Path(hf_hub_download(name, "config.json")).parent)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    except HFValidationError as error:
        raise ModelError(f"--model {name}: {error}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"--model {name}: it could not be fetched from the hub: {reason}") from None

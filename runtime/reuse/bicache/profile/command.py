"""`ramet profile`."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from runtime.config import Config
from runtime.errors import ModelError
from runtime.models.resolve import resolve_model
from runtime.models.spec import LlamaSpec
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.bicache.profile.heat_map import draw_heat_map
from runtime.reuse.bicache.profile.records import Records
from runtime.reuse.bicache.profile.samples import Samples
from runtime.reuse.bicache.profile.settings import ProfileSettings

Settings = TypeVar("Settings", bound=BaseModel)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="where the table goes, as JSON")
    parser.add_argument("--plot", type=Path, help="where a heat map goes, as PNG; default: beside the table")
    parser.add_argument("--prefix", type=Path, help="text file: the shared prefix; default: made-up rules")
    parser.add_argument("--prompts", type=Path, help="text file: a prompt a line; default: made-up questions")
    for name, field in ProfileSettings.model_fields.items():
        flag, default = "--" + name.replace("_", "-"), field.get_default()
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        text = f"{field.description} (default: {shown})".replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=name.split("_")[-1].upper(), help=text)


def settings_from(parser: argparse.ArgumentParser, arguments: argparse.Namespace, kind: type[Settings]) -> Settings:
    """The settings of parsed options; a value out of range ends the program with one line and status 2."""
    given = {name: value for name, value in vars(arguments).items() if name in ProfileSettings.model_fields}
    try:
        return kind(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        parser.error(f"argument --{str(problem['loc'][0]).replace('_', '-')}: {message}, not {problem['input']!r}")


def profile(config: Config, settings: ProfileSettings, arguments: argparse.Namespace) -> int:
    """Measure a model, write table and picture. Raises ModelError."""
    # Not at the top: the other commands read these options, too, without torch.
    from runtime.execution.executor import Executor
    from runtime.reuse.bicache.profile.probe import Probe
    from runtime.reuse.bicache.profile.profiler import Profiler, header

    draws = find_spec("matplotlib") is not None
    if arguments.plot and not draws:
        raise ModelError("--plot needs matplotlib: pip install 'ramet[bench]'")
    path = resolve_model(config.model)
    spec = LlamaSpec.load(path)
    if spec.diffusion is None:
        raise ModelError(f"{spec.architecture} is no diffusion model: its prefixes are reused in all layers")
    if settings.length > spec.context_length:
        raise ModelError(f"--length is {settings.length}; the model's context is {spec.context_length}")
    if settings.longest_encoding > spec.context_length:
        raise ModelError(f"--kept makes encodings of {settings.longest_encoding}; the context is {spec.context_length}")
    tokenizer = Tokenizer.load(path)
    prefix = _read(arguments.prefix)
    prompts = [line for line in _read(arguments.prompts).splitlines() if line.strip()]
    samples = Samples(tokenizer.encode, prefix, prompts, settings.length, settings.gen_length, settings.seed)
    records = Records(
        arguments.out.with_name(arguments.out.name + ".partial"),
        header(spec, settings, arguments.prefix, arguments.prompts),
    )
    room = 2 * settings.length + settings.longest_encoding
    cache = config.cache.model_copy(update={"page_size": 1, "pool_tokens": room})
    probe = Probe(Executor(config.model_copy(update={"cache": cache}), path))
    table = Profiler(probe, samples, settings, records).run()
    arguments.out.write_text(json.dumps(table) + "\n", encoding="utf-8")
    if draws:
        draw_heat_map(table, arguments.plot or arguments.out.with_suffix(".png"))
    records.remove()
    _print(table, "")
    for kept, part in table["truncated"].items():
        _print(part, f"  where {kept} % of an encoding match")
    return 0


def _print(table: dict[str, Any], title: str) -> None:
    print(f"ratio %  cosine of all tokens  token by token  table{title}")
    both = [part["depths"] for part in table["by_cosine"].values()]
    for ratio, depth in table["depths"].items():
        if ratio:
            print(f"{ratio:7}  {both[0][ratio]:20}  {both[1][ratio]:14}  {depth:5}")


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None

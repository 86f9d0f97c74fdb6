"""The command `ramet profile`."""

import argparse
from importlib.util import find_spec

from loadgen.harness.options import add_options, flag, make
from loadgen.offline.profile.settings import (
    AnswerSettings,
    DepthSettings,
    FusionSettings,
    ProfileFiles,
    ProfileSettings,
)
from runtime.config import Config
from runtime.errors import ModelError

_FIELDS = ProfileFiles.model_fields | DepthSettings.model_fields
_OF_ANSWERS = {name: AnswerSettings.model_fields[name] for name in ("answers", "methods", "documents", "output")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _FIELDS | _OF_ANSWERS)
    parser.add_argument(
        "--fusion",
        action="store_true",
        help="for a causal model: measure methods of document reuse instead; takes --ratios of rows computed again "
        "(default: 5 15 30 50), --samples (24), --length of all documents (1024) and --seed",
    )


def settings_of(arguments: argparse.Namespace) -> tuple[ProfileFiles, ProfileSettings]:
    """Files and settings from parsed options. Raises ValueError, which names the option."""
    files = make(ProfileFiles, arguments)
    kind: type[ProfileSettings] = DepthSettings
    word, written = "a depth table", {"out", "plot", "prefix", "prompts"}
    if "answers" in vars(arguments):
        kind, word, written = AnswerSettings, "--answers", {"out", "plot"}
    elif arguments.fusion:
        kind, word, written = FusionSettings, "--fusion", {"out"}
    known = (_FIELDS | _OF_ANSWERS).keys() - kind.model_fields.keys() - written
    for name in vars(arguments).keys() & known:
        raise ValueError(f"{flag(name)}: not with {word}")
    return files, make(kind, arguments)


def profile(config: Config, files: ProfileFiles, settings: ProfileSettings) -> int:
    """Measure a model, and write and print its table. Raises ModelError."""
    if files.plot and find_spec("matplotlib") is None:
        raise ModelError("--plot needs matplotlib: `make extra-bench`, or `pip install matplotlib`")
    # Imported here, because reading the options must not import torch.
    from loadgen.offline.profile.answers import profile_answers
    from loadgen.offline.profile.depths import profile_depths
    from loadgen.offline.profile.fusion import profile_fusion

    if isinstance(settings, AnswerSettings):
        profile_answers(config, settings, files)
    elif isinstance(settings, FusionSettings):
        profile_fusion(config, settings, files.out)
    elif isinstance(settings, DepthSettings):
        profile_depths(config, settings, files)
    return 0

"""The command `ramet profile`."""

import argparse

from loadgen.harness.options import add_options, flag, make
from loadgen.offline.profile.settings import DepthSettings, FusionSettings, ProfileFiles, ProfileSettings
from runtime.config import Config

_FIELDS = ProfileFiles.model_fields | DepthSettings.model_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _FIELDS)
    parser.add_argument(
        "--fusion",
        action="store_true",
        help="for a causal model: measure methods of document reuse instead; takes --ratios of rows computed again "
        "(default: 5 15 30 50), --samples (24), --length of all documents (1024) and --seed",
    )


def settings_of(arguments: argparse.Namespace) -> tuple[ProfileFiles, ProfileSettings]:
    """Files and settings from parsed options. Raises ValueError, which names the option."""
    files = make(ProfileFiles, arguments)
    if not arguments.fusion:
        return files, make(DepthSettings, arguments)
    for name in vars(arguments).keys() & _FIELDS.keys() - FusionSettings.model_fields.keys() - {"out"}:
        raise ValueError(f"{flag(name)}: not with --fusion")
    return files, make(FusionSettings, arguments)


def profile(config: Config, files: ProfileFiles, settings: ProfileSettings) -> int:
    """Measure a model, and write and print its table. Raises ModelError."""
    # Imported here, because reading the options must not import torch.
    from loadgen.offline.profile.depths import profile_depths
    from loadgen.offline.profile.fusion import profile_fusion

    if isinstance(settings, FusionSettings):
        profile_fusion(config, settings, files.out)
    elif isinstance(settings, DepthSettings):
        profile_depths(config, settings, files)
    return 0

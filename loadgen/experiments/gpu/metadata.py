"""`python -m loadgen.experiments.gpu.metadata DIRECTORY`: Ramet's version for a checkout that is not installed.

A server asks Python's metadata for it. This needs nothing but Python.
"""

import sys
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def write_metadata(site: Path) -> Path:
    """Write the folder of metadata into a directory on the path of Python."""
    version = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["version"]
    folder = site / f"ramet-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ramet\nVersion: {version}\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    write_metadata(Path(sys.argv[1]))

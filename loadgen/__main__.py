"""`python -m loadgen`: the same as `ramet bench`."""

import argparse
import sys

from loadgen.commands import add_benches, run_bench


def main() -> int:
    """Run a benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("loadgen", description="Measure a server over HTTP, or parts of Ramet in process.")
    add_benches(parser)
    try:
        return run_bench(parser.parse_args())
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

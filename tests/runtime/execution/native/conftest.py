"""Skips what needs kernels that were not built or that this processor cannot run."""

import pytest

from runtime.execution.native.library import ISAS, Library, load


@pytest.fixture(params=ISAS, scope="module")
def library(request) -> Library:
    """Every library that can be run here."""
    library = load(request.param)
    if library is None:
        pytest.skip(f"the native kernels for {request.param} were not built, or this processor cannot run them")
    return library

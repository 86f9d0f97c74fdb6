"""The small diffusion models of the runtime's tests."""

from tests.runtime.conftest import any_dir, any_plain, deep_dir

__all__ = ["any_dir", "any_plain", "deep_dir"]

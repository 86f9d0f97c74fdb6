"""What is around FlashInfer's calls: its distribution, and the descriptions of kernels that are loaded or compiled."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from runtime.execution import flashinfer_package

_MODULES = {
    "activation": ["gen_act_and_mul_module"],
    "attention": ["gen_batch_prefill_module", "gen_batch_decode_module"],
    "cascade": ["gen_cascade_module"],
    "norm": ["gen_norm_module"],
    "quantization": ["gen_quantization_module"],
    "rope": ["gen_rope_module"],
    "sampling": ["gen_sampling_module"],
}


@dataclass
class Package:
    """The installed distribution.

    Attributes:
        version: its version.
        build: compiles and loads the kernels that a function describes.
        built: the functions whose kernels were loaded.
    """

    version: str = flashinfer_package.VERSION
    build: Callable[[str], None] = lambda name: None
    built: list[str] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the end of the test."""
        monkeypatch.setattr(flashinfer_package, "version", lambda _: self.version)
        for module, names in _MODULES.items():
            made = ModuleType(f"flashinfer.jit.{module}")
            for name in names:
                setattr(made, name, lambda *_, name=name: SimpleNamespace(build_and_load=lambda: self._load(name)))
            monkeypatch.setitem(sys.modules, made.__name__, made)

    def _load(self, name: str) -> None:
        self.build(name)
        self.built.append(name)

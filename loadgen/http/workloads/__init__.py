"""Workloads by name: every subclass of Workload in a module of this folder. `FewShot` is `--workload few-shot`."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules

from loadgen.http.workloads.base import Source, Workload


def _find() -> dict[str, type[Workload]]:
    found: dict[str, type[Workload]] = {}
    for module in iter_modules(__path__):
        for kind in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Workload) and not isabstract(kind):
                found[re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()] = kind
    return dict(sorted(found.items()))


WORKLOADS = _find()

__all__ = ["WORKLOADS", "Source", "Workload"]

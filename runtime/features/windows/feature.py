"""The door of sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from runtime.features.feature import Feature, Opening

if TYPE_CHECKING:
    from runtime.features.windows.strategy import WindowedPrefix


class WindowsFeature(Feature):
    """Prefixes of models of which some layers have a window: rows that no row can see are freed."""

    gauges: ClassVar[Mapping[str, tuple[str, str]]] = {
        "window_pages_used": (
            "ramet:window_pages_used",
            "Pages that live requests use in the pool of the layers with a window",
        ),
    }

    def default(self, opening: Opening) -> WindowedPrefix | None:
        near, spec = opening.executor.near, opening.executor.spec
        if near is None:
            return None
        from runtime.features.windows.strategy import WindowedPrefix
        from runtime.models.spec import DecoderSpec

        assert isinstance(spec, DecoderSpec)
        return WindowedPrefix(opening.cache, spec.num_layers, near, spec.largest_window)

"""The door of documents and prompt modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.features.feature import Feature, Opening

if TYPE_CHECKING:
    from runtime.features.chunks.preparer import ChunksPreparer
    from runtime.features.chunks.strategy import ChunkReuse
    from runtime.frontend.preparer import ServedModel


class ChunksFeature(Feature):
    """Documents and modules are encoded apart from the prompts that read them, and repaired there."""

    method = "chunks"

    def serves(self, opening: Opening) -> bool:
        return opening.reads_anywhere

    def strategy(self, opening: Opening) -> ChunkReuse:
        from runtime.features.chunks.strategy import ChunkReuse

        return ChunkReuse(opening.cache, opening.executor, opening.info)

    @staticmethod
    def preparer(served: ServedModel) -> ChunksPreparer:
        from runtime.features.chunks.preparer import ChunksPreparer

        return ChunksPreparer(served)

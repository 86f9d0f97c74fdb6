"""A drive that sees how its steps ran, so that no figure stands for another path than the one that it names."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from loadgen.offline.drive import ClockedDrive
from runtime.batch import ForwardBatch


class WatchedDrive(ClockedDrive):
    """A drive that counts its steps.

    Attributes:
        seen: `steps` that only decode, and of these `graphs` (ran as a CUDA graph) and `sharing` (several rows read one
            span); `prompts`, the other steps, and of these `prompt graphs`; since `forget`.
    """

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self.seen: Counter[str] = Counter()
        executor = self.core.executor
        run, graphs = executor.run, executor.decoder.graphs

        def watched(batch: ForwardBatch) -> torch.Tensor:
            self.seen["steps" if _decodes(batch) else "prompts"] += 1
            if _decodes(batch):
                self.seen["sharing"] += any(_several(edge.rows) for edge in batch.groups[0].attention.edges)
            return run(batch)

        self.replace(executor, "run", watched)
        if graphs is not None:
            in_graph = graphs.run

            def counted(batch: ForwardBatch) -> torch.Tensor | None:
                logits = in_graph(batch)
                self.seen["graphs" if _decodes(batch) else "prompt graphs"] += logits is not None
                return logits

            self.replace(graphs, "run", counted)

    def forget(self) -> None:
        """Begin to count anew."""
        self.seen.clear()

    def share(self, kind: str) -> float:
        """The share of their steps that were `graphs`, `sharing` or `prompt graphs`."""
        return self.seen[kind] / max(self.seen["prompts" if kind == "prompt graphs" else "steps"], 1)

    def demand(self, kind: str, wanted: bool) -> None:
        """Raise RuntimeError if no step was of a kind that is wanted, or any was of one that is not."""
        if bool(self.seen[kind]) != wanted:
            counts = f"{self.seen[kind]} of {self.seen['steps']} steps"
            raise RuntimeError(f"{kind}: {counts}, where {'some' if wanted else 'none'} should be")

    def demand_backend(self) -> None:
        """Raise RuntimeError if a GPU's steps run without FlashInfer, which has all dtypes but float32."""
        found, float32 = self.core.info.attention_backend, self.core.executor.dtype == torch.float32
        if self.core.executor.device.type != "cpu" and not float32 and found != "flashinfer":
            why = self.core.executor.decoder.note
            raise RuntimeError(f"the attention backend is {found}, where flashinfer should be: {why}")


def _decodes(batch: ForwardBatch) -> bool:
    """Whether each row gives a token, as without drafts only rows that decode do."""
    return len(batch.tokens) == len(batch.logits_rows)


def _several(rows: slice | torch.Tensor) -> bool:
    return (rows.stop - rows.start if isinstance(rows, slice) else len(rows)) > 1

"""The options that benches of engines in this process share."""

from pathlib import Path
from typing import Any

from pydantic import Field

from loadgen.harness import Bench, BenchError
from runtime.config import DEFAULT_MODEL, make_config
from runtime.models.resolve import resolve_model


class ModelBench(Bench):
    """A bench that opens engines in this process."""

    model: str = Field(DEFAULT_MODEL, description="a directory, GGUF file or name")
    engine: tuple[str, ...] = Field((), description="options of `ramet serve`, as in dtype=float32 device=cuda")

    def path(self) -> Path:
        """The model's directory. Raises ModelError."""
        return resolve_model(make_config(model=self.model).model)

    def options(self, **defaults: Any) -> dict[str, Any]:
        """The options of `--engine`, above those that the bench needs. Raises BenchError."""
        given = dict(option.partition("=")[::2] for option in self.engine)
        try:
            make_config(**given)
        except ValueError as error:
            raise BenchError(f"--engine: {error}") from None
        return defaults | given

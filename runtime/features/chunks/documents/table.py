"""Tables of measured methods: the cost of reusing documents, and the distance of answers from full prefill."""

from pathlib import Path

from pydantic import Field, ValidationError

from runtime.errors import ModelError
from runtime.features.chunks.ask import DocumentMethod, ReuseParams
from runtime.models.config_json import Unsupported, read_json
from runtime.models.spec import LlamaSpec

TABLE_FILE = "fusion.json"
_PUBLISHED = Path(__file__).with_name("tables")


class MeasuredMethod(ReuseParams):
    """A method with its options, and the results of its measurement."""

    method: DocumentMethod
    kl: float = Field(ge=0, description="mean KL to full prefill over answer tokens, in nats")
    cost: float = Field(ge=0, description="row_layers divided by those of full prefill")


def read_table(directory: Path) -> list[MeasuredMethod] | None:
    """The table in the model's directory, else the published table for this model; None if there is no table.

    A table is JSON: `{"model": ..., "measured": [{"method", "ratio", ..., "kl", "cost"}, ...]}`.

    Raises:
        ModelError: if the table in the model's directory is broken, or is for another model.
    """
    try:
        identity = LlamaSpec.load(directory).identity
    except Unsupported:  # documents are not reused for such a model
        return None
    own = directory / TABLE_FILE
    for path in [own] if own.exists() else sorted(_PUBLISHED.glob("*.json")):
        value = read_json(path)
        if value.get("model") == identity:
            return _read(value, path)
        if path == own:
            raise ModelError(f"the table {path} is for {value.get('model')}; the model is {identity}")
    return None


def _read(value: dict[str, object], path: Path) -> list[MeasuredMethod]:
    rows = value.get("measured")
    try:
        if isinstance(rows, list) and rows:
            return [MeasuredMethod.model_validate(row) for row in rows]
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ModelError(f"the table {path} cannot be read: {where}: {problem['msg']}") from None
    raise ModelError(f"the table {path} cannot be read: it has no rows")


def choose(table: list[MeasuredMethod] | None, max_kl: float) -> MeasuredMethod | None:
    """The cheapest measured method whose KL is at most `max_kl`; None if there is none."""
    near = [one for one in table or () if one.kl <= max_kl]
    return min(near, key=lambda one: (one.cost, one.kl), default=None)

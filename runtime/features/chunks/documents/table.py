"""Tables of measured methods: what they cost, and what answers lose against full prefill."""

import math
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from runtime.errors import ModelError
from runtime.features.chunks.ask import LED, DocumentMethod, ReuseParams
from runtime.features.chunks.documents.prompt import LEAD_ID
from runtime.models.config_json import Unsupported, read_json
from runtime.models.spec import DecoderSpec

TABLE_FILE = "fusion.json"
# Of a table of right answers, the most that the method auto may lose, as a share of all answers.
MOST_LOST = 0.02
# What shows it: so many questions (a method that loses none of 30 answers loses, at 95 %, at most 3 of 30), and an
# interval that ends here. Every table of a few questions has some method that lost nothing by chance.
ENOUGH_QUESTIONS, UNSURE = 30, 0.10
_PUBLISHED = Path(__file__).with_name("tables")


class MeasuredMethod(ReuseParams):
    """A method with its options, and the results of its measurement."""

    method: DocumentMethod
    lead: str | None = Field(None, description="behind which lead documents were encoded; null: alone")
    kl: float | None = Field(None, ge=0, description="mean KL to full prefill over answer tokens, in nats")
    lost: float | None = Field(None, ge=-1, le=1, description="full prefill's share of right answers minus its own")
    lost_interval: tuple[float, float] | None = Field(None, description="95 % interval of `lost`")
    questions: int = Field(0, ge=0, description="by how many questions `lost` was measured")
    cost: float = Field(ge=0, description="row_layers, or time to the first token, divided by full prefill's")

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.kl is None and self.lost is None:
            raise ValueError("kl or lost is missing")
        return self

    @property
    def reason(self) -> str:
        """What was measured, for answers."""
        if self.lost is None:
            return f"measured KL {self.kl:g}"
        return f"lost {100 * self.lost:g} points of right answers in {self.questions} questions"

    @property
    def lacking(self) -> int:
        """Questions that are still to be asked, about, before it is known whether answers are lost; 0: it is known.

        The interval narrows with the root of the number of questions.
        """
        if self.lost is None or (self.lost > MOST_LOST and self.questions >= ENOUGH_QUESTIONS):
            return 0
        least = ENOUGH_QUESTIONS
        if self.lost <= MOST_LOST:
            high = self.lost_interval[1] if self.lost_interval else 1.0
            least = max(least, math.ceil(self.questions * ((high - self.lost) / (UNSURE - self.lost)) ** 2))
        return max(least - self.questions, 0)

    @property
    def keeps(self) -> bool:
        """Whether it was shown to lose at most `MOST_LOST` of the right answers."""
        return self.lost is not None and self.lost <= MOST_LOST and not self.lacking


def lead_id(method: str) -> str | None:
    """See `MeasuredMethod.lead`."""
    return LEAD_ID if method in LED else None


def read_table(directory: Path) -> list[MeasuredMethod] | None:
    """The table in the model's directory, else the published table for this model; None if there is no table.

    A table is JSON: `{"model": ..., "measured": [{"method", "ratio", ..., "kl", "cost"}, ...]}`.

    Raises:
        ModelError: if the table in the model's directory is broken, or is for another model.
    """
    try:
        identity = DecoderSpec.load(directory).identity
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
            found = [MeasuredMethod.model_validate(row) for row in rows]
            return [one for one in found if one.lead == lead_id(one.method)]  # the rest measured another encoding
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ModelError(f"the table {path} cannot be read: {where}: {problem['msg']}") from None
    raise ModelError(f"the table {path} cannot be read: it has no rows")


def choose(table: list[MeasuredMethod], max_kl: float | None = None) -> MeasuredMethod | None:
    """The cheapest measured method that loses little; None if there is none.

    It was shown to lose at most `MOST_LOST` of the right answers or, if `max_kl` is given, has at most this KL.
    """
    if max_kl is None:
        near = [one for one in table if one.keeps]
    else:
        near = [one for one in table if one.kl is not None and one.kl <= max_kl]
    return min(near, key=lambda one: (one.cost, one.lost or 0, one.kl or 0), default=None)

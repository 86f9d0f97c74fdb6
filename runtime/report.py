"""What the engine reports of a request's reuse. Each way of reuse has a struct of its own, beside its ask."""

from typing import ClassVar

import msgspec


class Report(msgspec.Struct, tag_field="strategy"):
    """Base of the reports, whose tags are names of strategies. Answers lack the fields that are UNSET.

    Attributes:
        inline: whether `/generate` writes the fields among those of `meta_info`, in each event. Otherwise answers have
            an object `reuse` at their end.
    """

    inline: ClassVar[bool] = False

    @property
    def computed_parts(self) -> tuple[str, list[str]] | None:
        """What the prompt's parts are, and the names of those that were not cached; None: it is found by prefix."""
        return None

    def fields(self) -> dict[str, object]:
        """The fields as answers have them."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        if self.inline:
            del fields["strategy"]
        return fields

"""Reuse depths that follow from the divergence measured while requests with a prefix are served."""

from dataclasses import dataclass, field

from runtime.features.diffusion.bicache.depth_table import DepthTable

# The first 16 requests of a prefix measure until its depth is settled; after that every 16th request measures.
_FIRST = _AGAIN = 16
# The first requests do not distinguish depths that differ by this or less: a trial costs a forward pass, and a gain of
# so few layers needs about twelve requests to repay it.
_LAYERS_APART = 7
# A new measurement changes the mean by at least 1 / 16 of its difference, so that means follow recent requests.
_WINDOW = 16


@dataclass(slots=True)
class Tally:
    """The number and the mean of measurements, in nats."""

    count: int = 0
    mean: float = 0.0

    def add(self, nats: float) -> None:
        self.count += 1
        self.mean += (nats - self.mean) / min(self.count, _WINDOW)


class MeasuredDepths:
    """Mean divergence by depth, over requests in which the prefix has about the same share.

    Divergence is assumed to grow with the depth; depth 1 is exact.

    Attributes:
        tallies: by depth, the divergence of a refreshing step from the same step without reuse.
        reach: the next depth to try, since its cached values are near the exact ones; 0: unknown.
        requests: number of admitted requests.
    """

    def __init__(self) -> None:
        self.tallies: dict[int, Tally] = {}
        self.reach = self.requests = 0

    def note(self, depth: int, nats: float) -> None:
        self.tallies.setdefault(depth, Tally()).add(nats)

    def choose(self, bound: float, start: int) -> int:
        """The largest measured depth within the bound, else 1. `start`: the result before any measurement."""
        if bound == 0:
            return min(start, 1)
        return self._around(bound)[0] if self.tallies else start

    def trial(self, bound: float, start: int, top: int) -> int:
        """The depth to measure next, at most `top`. A result of 1 means that no measurement is needed."""
        if not self.tallies and 1 < start <= top:
            return start
        low, high = self._around(bound)
        if high is None:
            return self.reach if low < self.reach <= top else min(2 * low, top)
        return low if _is_near(low, high, 1) else (low + high) // 2

    def is_settled(self, bound: float, top: int) -> bool:
        """Whether the chosen depth is final: the larger depths exceed the bound, `top` or `reach`."""
        low, high = self._around(bound)
        unlikely = self.reach + 1 if high is None and self.reach else high
        return bound == 0 or low >= top or (unlikely is not None and _is_near(low, unlikely, _LAYERS_APART))

    def wants(self, bound: float, top: int) -> bool:
        """Whether the next request measures a depth of at most `top`."""
        is_new = self.requests < _FIRST and not self.is_settled(bound, top)
        return top > 1 and (is_new or self.requests % _AGAIN == 0)

    def _around(self, bound: float) -> tuple[int, int | None]:
        """The largest measured depth within the bound, and the smallest that exceeds it (None: there is none)."""
        high = min((depth for depth, tally in self.tallies.items() if tally.mean > bound), default=None)
        within = (depth for depth in self.tallies if high is None or depth < high)
        return max(within, default=1), high


def _is_near(low: int, high: int, apart: int) -> bool:
    return high <= max(low + apart, 3 * low // 2)


class Measured:
    """The measured depths of a prefix, separate for each tenth of its share of a request."""

    def __init__(self) -> None:
        self._depths: dict[int, MeasuredDepths] = {}

    def at(self, ratio: float) -> MeasuredDepths:
        """The measurements for a ratio of 0 to 1."""
        return self._depths.setdefault(int(10 * ratio + 1e-9), MeasuredDepths())

    def describe(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mean nats by depth, by the lower end of the prefix's share of a request in percent."""
        return {
            str(10 * tenth): {"depth": {str(depth): round(t.mean, 4) for depth, t in sorted(found.tallies.items())}}
            for tenth, found in sorted(self._depths.items())
            if found.tallies
        }


@dataclass(frozen=True, slots=True)
class ShallowMeta:
    """BiCache's record on a node of an encoded prefix: it says in how many layers the KV may be reused.

    Under bidirectional attention, the KV of a token depends on the whole prefix. So if a node is split, both parts keep
    the same record, whose numbers describe the whole prefix.

    Attributes:
        encoded_tokens: length of the whole encoded prefix, of which this node holds a part.
        table: depths and similarities by the prefix's share of a request.
        measured: divergences measured in requests that shared the prefix.
    """

    encoded_tokens: int
    table: DepthTable
    measured: Measured = field(default_factory=Measured, compare=False)

    @property
    def tokens(self) -> int:
        return self.encoded_tokens

    def describe(self) -> dict[str, object]:
        table, measured = self.table, self.measured.describe()
        found: dict[str, object] = {"measured": measured} if measured else {}
        return found | {
            "encoded_tokens": self.encoded_tokens,
            "depth_table": table.version,
            "depths": {str(ratio): depth for ratio, depth in sorted(table.depths.items())},
            "similarity": {
                str(ratio): round(layers[min(table.depths[ratio], len(layers)) - 1], 4)
                for ratio, layers in sorted(table.similarity.items())
                if table.depths.get(ratio)
            },
        }

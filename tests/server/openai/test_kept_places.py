"""Up to which places a prompt is kept, and for which time: whole results for each option."""

import pytest

from runtime.frontend.output import MarkedText
from server.openai.caching import CacheOptions, ExplicitBreakpoint, keep_places

FOREVER, MINUTES, HALF_DAY = 86_400.0, 1800.0, 43_200.0
# Options and retention of a request, and what is kept of "ab" with a breakpoint of 12 hours behind a and one without a
# time behind b.
KEPT = [
    (None, None, [(1, HALF_DAY), (2, MINUTES), (2, MINUTES)]),
    (None, "in_memory", [(1, HALF_DAY), (2, MINUTES), (2, MINUTES)]),
    (None, "24h", [(1, HALF_DAY), (2, FOREVER), (2, FOREVER)]),
    ({}, "24h", [(1, HALF_DAY), (2, MINUTES), (2, MINUTES)]),
    ({"ttl": "12h"}, None, [(1, HALF_DAY), (2, HALF_DAY), (2, HALF_DAY)]),
    ({"ttl": "30m"}, "24h", [(1, HALF_DAY), (2, MINUTES), (2, MINUTES)]),
    ({"mode": "explicit"}, None, [(1, HALF_DAY), (2, MINUTES)]),
    ({"mode": "explicit"}, "24h", [(1, HALF_DAY), (2, MINUTES)]),
    ({"mode": "explicit", "ttl": "12h"}, "24h", [(1, HALF_DAY), (2, HALF_DAY)]),
]


@pytest.mark.parametrize(("options", "retention", "kept"), KEPT)
def test_what_is_kept_for_which_time(options, retention, kept):
    points = [ExplicitBreakpoint(mode="explicit", ttl="12h"), ExplicitBreakpoint(mode="explicit")]
    given = None if options is None else CacheOptions(**options)
    assert keep_places(lambda mark: f"a{mark(points[0])}b{mark(points[1])}", given, retention) == MarkedText("ab", kept)
    # Without breakpoints, an option or a retention asks for the end of the prompt, and nothing for nothing.
    asks = bool(options) or retention == "24h"
    ends = kept[2:] if len(kept) > 2 and asks else []
    assert keep_places(lambda mark: "ab", given, retention) == (MarkedText("ab", ends) if ends else "ab")


def test_the_last_breakpoints_are_kept_where_there_are_too_many():
    points = [ExplicitBreakpoint(mode="explicit") for _ in range(6)]
    for options, wanted in ((None, [4, 5, 6, 6]), (CacheOptions(mode="explicit"), [3, 4, 5, 6])):
        found = keep_places(lambda mark: "".join(f"a{mark(point)}" for point in points), options, None)
        assert [place for place, _ in found.breakpoints] == wanted

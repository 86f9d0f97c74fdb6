"""Ties: greedy answers that differ from the idle server's within rounding.

In bfloat16 the composition of a batch moves log-probabilities by a rounding. Where the first two choices are closer
than that, either may be taken, and another text follows, as good as the first. So an answer is judged by the idle
server's log-probability of each of its tokens, given those before: a fault shows as a token far from the first choice.
"""

from __future__ import annotations

from loadgen.faults.server import Server

# Nats between two choices of which either may be taken; the default model shows up to 0.02.
TIE_NATS = 0.05


async def apart(server: Server, prompt: list[int], expected: list[int], found: list[int]) -> float:
    """Distance in nats between two greedy answers of one length, asked of an idle server.

    It is the larger of two: the gap between the two tokens where the answers part, and the greatest shortfall of a
    token of `found` from the first choice.
    """
    parted = next(i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other)
    theirs, own = await _scored(server, prompt, expected), await _scored(server, prompt, found)
    return max(abs(theirs[parted][0] - own[parted][0]), _worst(own))


async def shortfall(server: Server, prompt: list[int], answer: list[int]) -> float:
    """By how many nats an answer's worst token falls short of the first choice when the server reads it as a prompt."""
    return _worst(await _scored(server, prompt, answer))


def _worst(scored: list[tuple[float, float]]) -> float:
    return max(first - own for own, first in scored)


async def _scored(server: Server, prompt: list[int], answer: list[int]) -> list[tuple[float, float]]:
    """For each token of an answer its log-probability and that of the first choice. Raises RuntimeError."""
    wanted = {"return_logprob": True, "logprob_start_len": len(prompt), "top_logprobs_num": 1}
    status, scored = await server.generate(prompt + answer, 1, **wanted)
    if status != 200:
        raise RuntimeError(f"an answer cannot be scored: {status} {scored}")
    meta = scored["meta_info"]
    pairs = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
    return [(own[0], top[0][0]) for own, top in pairs]

"""Whether an answer that is not the idle server's is a greedy answer all the same.

In bfloat16 the order in which a batch's rows are summed up moves log-probabilities a little. Where the first two
choices are closer than that, either may be taken, and what follows is another text, as good as the first. So an answer
is judged by what the idle server thinks of each of its tokens, given those before: a fault shows as a token that is far
from the first choice.
"""

from __future__ import annotations

from loadgen.faults.victim import Victim

# Nats between two choices of which either may be taken; up to 0.02 are seen with the default model.
TIE_NATS = 0.05


async def apart(victim: Victim, prompt: list[int], expected: list[int], found: list[int]) -> float:
    """How far two greedy answers of one length are from being equally good, in nats; to be asked while nothing runs.

    It is the larger one of: how far apart the two tokens are where the answers part, and by how much any token of
    `found` falls short of the first choice.
    """
    parted = next(i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other)
    theirs, own = await _scored(victim, prompt, expected), await _scored(victim, prompt, found)
    return max(abs(theirs[parted][0] - own[parted][0]), _worst(own))


async def shortfall(victim: Victim, prompt: list[int], answer: list[int]) -> float:
    """By how many nats an answer's worst token falls short of the first choice when the server reads it as a prompt."""
    return _worst(await _scored(victim, prompt, answer))


def _worst(scored: list[tuple[float, float]]) -> float:
    return max(first - own for own, first in scored)


async def _scored(victim: Victim, prompt: list[int], answer: list[int]) -> list[tuple[float, float]]:
    """For each token of an answer its log-probability and that of the first choice. Raises RuntimeError."""
    wanted = {"return_logprob": True, "logprob_start_len": len(prompt), "top_logprobs_num": 1}
    status, scored = await victim.generate(prompt + answer, 1, **wanted)
    if status != 200:
        raise RuntimeError(f"an answer cannot be scored: {status} {scored}")
    meta = scored["meta_info"]
    pairs = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
    return [(own[0], top[0][0]) for own, top in pairs]

"""Explains cache misses for all routes."""

from collections.abc import Callable

from radix.node import TOKEN_BYTES, common_tokens
from runtime.asks import DocumentsReport, ModulesReport, ReuseReport, SharedPrefixReport, Unshared
from runtime.errors import RametError
from runtime.frontend.output import Encoded, Output
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import Lookup
from server.auth.keys import PUBLIC
from server.explain.answers import Answers
from server.explain.compare import Parting, find_parting
from server.explain.conversation import Conversation
from server.explain.reason import DIFFER, LEFT, Explanation, Reason

# Reason and message for a request that shares no prefix, where the strategy says why.
_UNSHARED: dict[Unshared, tuple[Reason, str]] = {
    "off": ("not_stored", "prefixes are not shared: reuse, or the prefix cache, is off"),
    "no_prefix": ("never_here", "a shared prefix is neither declared nor found; a chat declares its system message"),
    "too_short": ("too_short", "the shared prefix fills no page"),
    "no_room": ("unavailable", "the pool is too small for the shared prefix and the rest of the request"),
    "no_layer": ("unavailable", "the depth table or the request reuses the shared prefix in no layer"),
}

# Makes a prompt's conversation on demand; raises RametError.
MakeConversation = Callable[[], Conversation | None]


def plain_text() -> None:
    """The `MakeConversation` of a prompt that is plain text."""


class MissReport:
    """Explains the cache misses of one request. Create it before the prompts are submitted.

    Args:
        answers: the recent prompts, among them that of `earlier`.
        account: the request's, whose submissions must have `explain`.
        earlier: id of an answer of the same account, to compare with its prompt; None: with the nearest cached prompt.
        conversation: makes the conversation of a single prompt; default: prompts are plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answers: Answers,
        account: str,
        earlier: str | None = None,
        conversation: MakeConversation = plain_text,
    ):
        self._tokenizer = tokenizer
        self._earlier = earlier
        self._asked = None if earlier is None else answers.find(account, earlier)
        self._conversation = conversation

    async def explain(self, outputs: OutputStream, output: Output) -> Explanation:
        """Why the prompt of this Output missed the cache. The Output must have tokens."""
        found: list[Explanation] = []
        await outputs.in_turn(lambda: found.append(self._explain(outputs.submissions[output.index], output)))
        return found[0]

    def _explain(self, submission: Encoded, output: Output) -> Explanation:
        lookup = output.lookup
        length, page = output.prompt_tokens, 1 if lookup is None else lookup.page_size

        def because(reason: Reason, message: str, parting: Parting | None = None) -> Explanation:
            compared = self._earlier or ("nearest" if parting else None)
            return Explanation(reason, message, length, output.cached_tokens, compared, parting, output.replayed)

        if (found := _not_by_prefix(output.reuse, output.cached_tokens)) is not None:
            return because(*found)
        if lookup is None:
            return because("unavailable", "the prompt was not looked up in the cache; `reuse` may show why")
        if lookup.readable < 0:
            return because("not_stored", "the prefix cache is off")
        if lookup.readable < min(lookup.found, length - 1):
            wanted = f"the request asks for log-probabilities, so tokens from {lookup.readable} on are computed"
            return because("not_read", wanted)
        if lookup.point is not None and (ends := min(lookup.found, length - 1)) - lookup.point > page:
            return because(*_no_point(lookup, ends))
        if length < page and not output.cached_tokens:
            return because("too_short", f"the prompt has {length} tokens, but only whole pages of {page} are cached")
        if lookup.found >= max((length - 1) // page * page, 1):
            return because("hit", f"everything cached for this prompt was read: {output.cached_tokens} tokens")
        if self._earlier is not None:
            return self._against_earlier(submission, lookup, because)
        if lookup.why is not None:
            return because(*_left(lookup))
        if not lookup.found or not lookup.other:
            if lookup.found:
                known = f"everything cached for this prompt was read: {output.cached_tokens} tokens"
                return because("new_text", f"{known}; {_unknown(lookup)}")
            return because("never_here", f"nothing of this prompt is in the cache; {_unknown(lookup)}")
        other = None if submission.namespace.tenant == PUBLIC else lookup.other
        parting = self._part(submission, lookup.found, other)
        return because(*_differs(parting, "the nearest cached prompt"), parting)

    def _against_earlier(self, submission: Encoded, lookup: Lookup, because: Callable[..., Explanation]) -> Explanation:
        """The reason for a miss, found by comparison with the prompt of an earlier answer."""
        asked, named = self._asked, f"the prompt of {self._earlier}"
        if asked is None:
            return because("comparison_not_found", f"this key has no recent answer {self._earlier!r}")
        if asked.namespace != submission.namespace:
            return because(
                "other_salt", f"{named} had another cache_salt, cache_scope or adapter, so they share no pages"
            )
        shared = common_tokens(submission.tokens, 0, asked.tokens)
        other = asked.tokens[shared * TOKEN_BYTES :]
        parting = self._part(submission, shared, other) if other else None
        if lookup.found < shared // lookup.page_size * lookup.page_size:
            if lookup.why is not None:
                return because(*_left(lookup), parting)
            missing = f"but the cache ends at token {lookup.found}; {_unknown(lookup)}"
            return because("not_stored", f"{named} has the same first {shared} tokens, {missing}")
        if parting is None:
            return because("hit", f"all of {named} was read from the cache: {shared} tokens; the rest is new")
        return because(*_differs(parting, named), parting)

    def _part(self, submission: Encoded, token: int, other: bytes | None) -> Parting:
        try:
            conversation = self._conversation()
        except RametError:  # for example, a document was deleted after the submission
            conversation = None
        return find_parting(self._tokenizer, submission.tokens, token, other, conversation)


def _no_point(lookup: Lookup, ends: int) -> tuple[Reason, str]:
    """The reason for a miss of a model with recurrent layers or windows, whose KV is cached up to token `ends`."""
    at = f"the nearest resume point is at token {lookup.point}" if lookup.point else "there is no resume point"
    why = "states, and rows that windows show, are kept behind turns and prompts, and where two prompts part"
    if lookup.lost is not None:
        why = f"the one at token {lookup.lost} {LEFT[str(lookup.why)][1].format(_seconds(lookup.gone_s))}"
    return "no_point", f"the KV of the first {ends} tokens is in the cache, but {at}: {why}"


def _unknown(lookup: Lookup) -> str:
    since = f" in the last {_seconds(lookup.known_s)} s" if lookup.known_s >= 1 else ""
    return f"no more of its pages are known to have been there{since}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _not_by_prefix(reuse: ReuseReport | None, cached: int) -> tuple[Reason, str] | None:
    """The reason for a prompt whose KV is not found by prefix; None for other prompts."""
    if isinstance(reuse, ModulesReport) and (missing := reuse.computed_modules):
        return "entries_missing", f"these modules were not cached and had to be computed: {', '.join(missing)}"
    if isinstance(reuse, DocumentsReport) and (missing := reuse.computed_documents):
        return "entries_missing", f"these documents were not cached and had to be computed: {', '.join(missing)}"
    if isinstance(reuse, SharedPrefixReport) and not cached:
        if length := reuse.encoded_tokens:
            return "entries_missing", f"the shared prefix of {length} tokens was not cached and had to be computed"
        return _UNSHARED[reuse.unshared] if isinstance(reuse.unshared, str) else None
    if isinstance(reuse, ModulesReport | DocumentsReport | SharedPrefixReport):
        return "hit", f"all reusable KV was in the cache: {cached} tokens; see `reuse`"
    return None


def _left(lookup: Lookup) -> tuple[Reason, str]:
    reason, text = LEFT[str(lookup.why)]
    place = f"the KV behind the first {lookup.found} tokens" if lookup.found else "the KV of this prompt"
    return reason, f"{place} {text.format(_seconds(lookup.gone_s))}"


def _differs(parting: Parting, other: str) -> tuple[Reason, str]:
    verb = "differ" if parting.part.kind == "tools" else "differs"
    place = f"at token {parting.token}, behind {parting.offset} characters of it"
    return DIFFER[parting.part.kind], f"{parting.part} {verb} from {other}: {place}"

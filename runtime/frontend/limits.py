"""Limits on open requests and waiting tokens, for the server and for each API key."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.config import SchedulerConfig
from runtime.errors import Overloaded, RateLimited


class RequestLimits:
    """Counts open completions and waiting prompt tokens by account; refuses requests over the limits."""

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self.open: Counter[str] = Counter()
        self.waiting_tokens: Counter[str] = Counter()

    def check(self, account: str, completions: int, tokens: int) -> None:
        """Raise Overloaded or RateLimited if `completions` of a prompt of `tokens` tokens exceed a limit now."""
        config = self._config
        # The limit does not hold for the only waiting request, or a longer prompt could never be served.
        if (queued := self.waiting_tokens.total()) and queued + tokens > config.max_waiting_tokens:
            raise Overloaded(f"{queued} prompt tokens are waiting; the limit is {config.max_waiting_tokens}")
        if (total := self.open.total()) + completions > config.max_open:
            raise Overloaded(f"{total} requests are open; the limit is {config.max_open}; try again")
        most = self.most_open(account)
        if (own := self.open[account]) + completions > most:
            raise RateLimited(f"this key has {own} open requests; the limit is {most}")
        most = self._share(account, config.max_waiting_tokens)
        if (own := self.waiting_tokens[account]) and own + tokens > most:
            raise RateLimited(f"{own} prompt tokens of this key are waiting; the limit is {most}")

    def check_batch(self, account: str, tokens: int) -> None:
        """Raise Overloaded or RateLimited if several prompts of one request have more `tokens` than may ever wait."""
        if tokens > (most := self._config.max_waiting_tokens):
            raise Overloaded(f"the prompts have more than {most} tokens, which is the limit on those that wait")
        if tokens > (most := self._share(account, most)):
            raise RateLimited(f"the prompts have more than {most} tokens; the limit is {most} for one key")

    def most_open(self, account: str) -> int:
        """Largest number of open requests of an account."""
        return self._share(account, self._config.max_open)

    def _share(self, account: str, total: int) -> int:
        """The part of a limit for one account: `key_share` of it, or without API keys all of it."""
        return max(int(total * self._config.key_share), 1) if account else total

    @contextmanager
    def held(self, account: str, completions: int, tokens: int) -> Iterator[None]:
        """Count work in the server's process, such as tokenizing, while it runs. Raises the errors of `check`."""
        self.check(account, completions, tokens)
        self.open[account] += completions
        self.waiting_tokens[account] += tokens
        try:
            yield
        finally:
            self._take(self.open, account, completions)
            self._take(self.waiting_tokens, account, tokens)

    def enter(self, account: str, tokens: int) -> None:
        """Count a new completion and the waiting `tokens` of its prompt."""
        self.open[account] += 1
        self.waiting_tokens[account] += tokens

    def begin(self, account: str, tokens: int) -> None:
        """Uncount the `tokens` of a prompt that no longer waits."""
        self._take(self.waiting_tokens, account, tokens)

    def leave(self, account: str) -> None:
        """Uncount a completion that has ended."""
        self._take(self.open, account, 1)

    @staticmethod
    def _take(counter: Counter[str], account: str, amount: int) -> None:
        counter[account] -= amount
        if not counter[account]:
            del counter[account]

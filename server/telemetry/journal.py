"""The journal of ended requests and the recorded trace: lengths, times and hashes, never text."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from functools import partial
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import IO

from runtime.calls import Owned
from runtime.errors import RametError
from runtime.frontend.output import Encoded, Output, Submission
from server.auth.keys import Tenant

log = logging.getLogger("ramet.server")

# Ended requests that are remembered for each tenant.
_MOST = 100
# Most characters of an error's message.
_CLIP = 300
# Tokens in a block of the trace, and bytes of a token.
BLOCK_TOKENS, _TOKEN_BYTES = 16, 4


class BadTrace(RametError):
    """The trace file cannot be written."""


class Ended(Owned, frozen=True, kw_only=True, omit_defaults=True):
    """A completion that has ended; `at_s`: seconds since the epoch."""

    rid: str
    at_s: float
    e2e_s: float
    finish: str
    error: str | None = None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float
    prefill_s: float


class Journal:
    """The latest completions of every tenant. Ended requests also go to the trace, if there is one."""

    def __init__(self, trace: Trace | None = None):
        self._last: dict[str, deque[Ended]] = {}
        self._trace = trace

    def add(self, submission: Encoded, output: Output) -> None:
        """Record a completion by its last Output."""
        assert output.finish is not None
        self._note(submission, output, output.e2e_s, output.finish.type)
        if self._trace is not None and not output.choice:
            self._trace.add(submission, output)

    def add_failed(
        self, submission: Submission, output: Output | None, seconds: float, error: RametError | None
    ) -> None:
        """Record a completion that failed, with its latest Output; `error` None: the client disconnected."""
        finish, message = ("client left", None) if error is None else (error.type, error.message[:_CLIP])
        self._note(submission, output, seconds, finish, message)

    def _note(
        self, submission: Submission, output: Output | None, seconds: float, finish: str, error: str | None = None
    ) -> None:
        prompt = len(submission.tokens) // _TOKEN_BYTES if isinstance(submission, Encoded) else 0
        entry = Ended(
            tenant=submission.account,
            rid=submission.rid,
            at_s=round(time.time(), 3),
            e2e_s=round(seconds, 4),
            finish=finish,
            error=error,
            prompt_tokens=prompt if output is None else output.prompt_tokens,
            cached_tokens=0 if output is None else output.cached_tokens,
            output_tokens=0 if output is None else output.completion_tokens,
            queue_s=0 if output is None else round(output.queue_s, 4),
            prefill_s=0 if output is None else round(output.prefill_s, 4),
        )
        self._last.setdefault(submission.account, deque(maxlen=_MOST)).append(entry)

    def erase(self, account: str) -> None:
        """Erase a tenant's completions, also from the trace. Raises BadTrace."""
        self._last.pop(account, None)
        if self._trace is not None:
            self._trace.erase(account)

    def last(self, account: str | None) -> list[Ended]:
        """The latest completions of a tenant (None: of all tenants), latest first; `tenant` is the account."""
        found = [entry for name, entries in self._last.items() for entry in entries if account in (None, name)]
        return sorted(found, key=lambda entry: entry.at_s, reverse=True)[:_MOST]


def open_trace(path: Path | None, tenants: list[Tenant]) -> Trace | None:
    """The trace of `--record-trace`, if there is one. Raises BadTrace."""
    return None if path is None else Trace(path, {tenant.account: tenant.name for tenant in tenants})


def _append(path: Path) -> IO[str]:
    return open(path, "a", encoding="utf-8", buffering=1, opener=partial(os.open, mode=0o600))


class Trace:
    """A file of JSON lines in Mooncake's format: timestamp (ms), lengths, hashes of blocks of BLOCK_TOKENS tokens.

    Hashes are keyed with a secret of this process and chained, beginning with tenant and salt, so that they reveal only
    which prompts begin alike. A line is written when its request ends.

    Args:
        path: the file to append to.
        names: tenants' names by account.
    """

    def __init__(self, path: Path, names: dict[str, str]):
        self._path, self._names, self._secret = path.resolve(), names, token_bytes(32)
        try:
            self._file = _append(path)
        except OSError as error:
            raise BadTrace(f"--record-trace {path} cannot be written: {error.strerror}") from None

    def erase(self, account: str) -> None:
        """Remove a tenant's lines from the file, also those of earlier recordings. Raises BadTrace.

        What a pipe has passed on cannot be removed.
        """
        if not self._path.is_file():
            return
        end = f'"tenant":{json.dumps(self._names.get(account, ""))}}}\n'
        new = self._path.with_name(f"{self._path.name}.{token_hex(8)}")
        try:
            with open(self._path, encoding="utf-8") as old, _append(new) as kept:
                kept.writelines(line for line in old if not line.endswith(end))
            os.replace(new, self._path)
            if not self._file.closed:
                self._file.close()
                self._file = _append(self._path)
        except (OSError, ValueError) as error:
            new.unlink(missing_ok=True)
            raise BadTrace(f"--record-trace: the lines of the tenant are not erased: {error}") from None

    def add(self, submission: Encoded, output: Output) -> None:
        """Append the line of an ended request."""
        line = {
            "timestamp": round(1000 * (time.time() - output.e2e_s)),
            "input_length": output.prompt_tokens,
            "output_length": output.completion_tokens,
            "block_tokens": BLOCK_TOKENS,
            "hash_ids": self._hashes(submission),
            "tenant": self._names.get(submission.account, ""),
        }
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except (OSError, ValueError) as error:
            if not self._file.closed:
                log.error("--record-trace: the recording stops: %s", error)
                with contextlib.suppress(OSError):
                    self._file.close()

    def _hashes(self, submission: Encoded) -> list[int]:
        digest, size = submission.namespace.to_bytes(), BLOCK_TOKENS * _TOKEN_BYTES
        found = []
        for start in range(0, len(submission.tokens), size):
            block = digest + submission.tokens[start : start + size]
            digest = blake2b(block, digest_size=6, key=self._secret).digest()
            found.append(int.from_bytes(digest, "little"))
        return found

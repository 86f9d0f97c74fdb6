"""No module unpickles, runs remote code, or listens where others can reach it."""

import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtime.errors import RametError
from server import responses
from server.app import find_routers
from server.http.body import Body

ROOT = Path(__file__).parents[2]
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for room in ("radix", "runtime", "server")
    for path in (ROOT / room).rglob("*.py")
}


def modules_with(pattern: str) -> set[str]:
    return {name for name, text in TEXTS.items() if re.search(pattern, text, re.MULTILINE)}


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\s*(from|import) (pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\b",
        r"(?<!safetensors\.)\b(torch|np|numpy)\.load\(",
        r"_pyobj\(",  # ZeroMQ's own pickling
        r"\btrust_remote_code=(?!False)",
    ],
)
def test_nothing_is_unpickled_and_no_remote_code_is_run(pattern):
    assert len(TEXTS) > 50
    assert modules_with(pattern) == set()


def test_sockets_between_processes_are_their_owners_alone(server):
    directories = {
        Path(line.split()[-1]).parent for line in Path("/proc/net/unix").read_text().splitlines() if "/ramet-" in line
    }
    assert directories
    for directory in directories:
        with suppress(FileNotFoundError):  # another test's server may end meanwhile
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory


def bodies(kind: type[Body]) -> Iterator[type[Body]]:
    for own in kind.__subclasses__():
        yield from (own, *bodies(own))


def test_no_unexpected_error_of_a_body_writes_a_prompt_into_the_log():
    find_routers(responses)  # which imports the bodies
    said = []
    for kind in {*bodies(Body)}:
        try:
            kind.model_validate({name: ["quartz"] for name in kind.KNOWN})
        except ValidationError as error:
            said.append(str(error))
        except RametError:  # which is expected
            pass
    assert len(said) > 30
    assert not [text for text in said if "quartz" in text]


# Modules that report the time of day, or note it for another process; all others measure durations, which a clock that
# jumps must not change.
TELLS_THE_TIME = {
    "runtime/features/tiers/resume.py",
    "runtime/features/kv_events/publisher.py",
    "runtime/features/tiers/files.py",
    "runtime/models/template_program.py",
    "server/admin/control.py",
    "server/admin/dashboard.py",
    "server/admin/history.py",
    "server/openai/common.py",
    "server/openai/models.py",
    "server/responses/writer.py",
    "server/telemetry/journal.py",
    "server/tiers/command.py",
}


def test_no_duration_is_measured_by_the_wall_clock():
    found = modules_with(r"\btime\.time(_ns)?\b|\bdatetime\.(utc)?now\b|^from time import .*\btime")
    assert found
    assert found <= TELLS_THE_TIME

"""Names of tools as the model sees them.

Templates and grammars write names between tags of all kinds, so a model sees letters, digits, `_`, `.` and `-` alone.
Answers have the names that the request gave.
"""

import re
from collections.abc import Iterable

_OTHERS = re.compile(r"[^A-Za-z0-9_.-]")


def safe_names(given: Iterable[str]) -> dict[str, str]:
    """For each name that the model does not see as it is, the name that it sees, which no other tool has."""
    names = list(dict.fromkeys(given))
    taken = {name for name in names if not _OTHERS.search(name)}
    found: dict[str, str] = {}
    for name in names:
        if name not in taken:
            plain = base = _OTHERS.sub("_", name)
            number = 2
            while plain in taken:
                plain, number = f"{base}_{number}", number + 1
            taken.add(plain)
            found[name] = plain
    return found

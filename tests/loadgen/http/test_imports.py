"""`loadgen/http` knows a server over HTTP alone."""

from __future__ import annotations

import subprocess
import sys

_IMPORT_ALL = """
import pkgutil, sys
from importlib import import_module
import loadgen.http
names = [module.name for module in pkgutil.walk_packages(loadgen.http.__path__, "loadgen.http.")]
for name in names:
    import_module(name)
found = {name.split(".")[0] for name in sys.modules} & {"runtime", "radix", "server", "torch", "matplotlib"}
print(len(names), *sorted(found))
"""


def test_it_imports_no_part_of_ramet():
    out = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, check=True).stdout
    count, *found = out.split()
    assert int(count) > 30
    assert found == []


def test_a_bench_over_http_is_chosen_without_torch():
    code = "import sys\nfrom loadgen.__main__ import main\nmain()\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "serve", "--requests", "1", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cannot be reached" in done.stderr
    assert done.stdout.splitlines()[-1] == "False"

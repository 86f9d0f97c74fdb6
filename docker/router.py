"""Starts SGLang's router so that only the admin's key may add or remove replicas.

The router accepts this key only as an argument. It is added to `sys.argv` here, because process lists show the
container's command.
"""

import sys
from pathlib import Path

from sglang_router.launch_router import main

KEY_FILE = Path("/run/secrets/admin_key")

key = KEY_FILE.read_text(encoding="utf-8").strip()
sys.argv += ["--control-plane-api-keys", f"admin:admin:admin:{key}"]
main()

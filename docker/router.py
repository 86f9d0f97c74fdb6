"""Starts SGLang's router so that only the admin's key may add or remove replicas.

The router takes that key as an argument alone. It is added here and not in the container's command, where every list of
processes would show it.
"""

import sys
from pathlib import Path

from sglang_router.launch_router import main

KEY_FILE = Path("/run/secrets/admin_key")

key = KEY_FILE.read_text(encoding="utf-8").strip()
sys.argv += ["--control-plane-api-keys", f"admin:admin:admin:{key}"]
main()

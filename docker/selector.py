"""Starts Dynamo's selection service, and registers the replicas with it.

$REPLICAS: NAME=URL of each, separated by blanks; events come from ports 5557 and 5558 of NAME. $MODEL: their model;
$BLOCK_SIZE: tokens in a page of theirs.
"""

import json
import os
import signal
import sys
import threading
import time
import urllib.request

from dynamo.select_service.main import main

URL = "http://127.0.0.1:8092/workers"


def register() -> None:
    """Register every replica, as soon as the service answers."""
    for number, replica in enumerate(os.environ["REPLICAS"].split(), start=1):
        name, _, url = replica.partition("=")
        worker = {
            "worker_id": number,
            "endpoint": url,
            "model_name": os.environ["MODEL"],
            "block_size": int(os.environ["BLOCK_SIZE"]),
            "kv_events_endpoints": {"0": f"tcp://{name}:5557"},
            "replay_endpoint": f"tcp://{name}:5558",
        }
        request = urllib.request.Request(URL, json.dumps(worker).encode(), {"Content-Type": "application/json"})
        while True:
            try:
                urllib.request.urlopen(request, timeout=10).close()
                break
            except OSError as error:
                print(f"{name} is not registered yet: {error}", file=sys.stderr)
                time.sleep(1)


# The service blocks its thread, and process 1 has no default for SIGTERM.
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
service = threading.Thread(target=main, args=(["--port", "8092"],), daemon=True)
service.start()
threading.Thread(target=register, daemon=True).start()
while service.is_alive() and not stopped.wait(1):
    pass
os._exit(0 if stopped.is_set() else 1)

"""aiperf: a short profile of chats."""

import json
import subprocess
import sys
from urllib.request import urlopen

url, model = sys.argv[1:]
tokenizer = json.load(urlopen(f"{url}/model_info"))["tokenizer_path"]
command = ["aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming"]
command += ["--request-count", "4", "--concurrency", "2", "--tokenizer", tokenizer, "--ui", "none"]
command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
print("a profile of chats")

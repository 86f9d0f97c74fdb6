"""guidellm: a short benchmark of chats."""

import json
import subprocess
import sys
from urllib.request import urlopen

url, model = sys.argv[1:]
tokenizer = json.load(urlopen(f"{url}/model_info"))["tokenizer_path"]
command = ["guidellm", "benchmark", "--target", url, "--model", model, "--rate-type", "synchronous"]
command += ["--max-requests", "4", "--data", "prompt_tokens=32,output_tokens=8", "--processor", tokenizer]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
print("a benchmark of chats")

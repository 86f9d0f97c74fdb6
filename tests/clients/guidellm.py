"""guidellm: a short benchmark of chats."""

import subprocess
import sys

url, model = sys.argv[1:]
command = ["guidellm", "benchmark", "--target", url, "--model", model, "--rate-type", "synchronous"]
command += ["--max-requests", "4", "--data", "prompt_tokens=32,output_tokens=8", "--processor", "gpt2"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
print("a benchmark of chats")

"""guidellm: a short benchmark of chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

url, model = sys.argv[1:]
tokenizer = json.load(urlopen(f"{url}/model_info"))["tokenizer_path"]
with tempfile.TemporaryDirectory() as home:
    found = Path(home) / "found.json"
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={url},model={model}"]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--disable-progress"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={found}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    totals = json.loads(found.read_text())["benchmarks"][0]["metrics"]["request_totals"]
assert totals["successful"] == 4, totals
print("a benchmark of chats")

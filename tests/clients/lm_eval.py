"""lm_eval: completions that score, with the server's own tokenizer; its data lies here, as no hub may be reached."""

import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as home:
    data, task = Path(home) / "data.jsonl", Path(home) / "trees.yaml"
    rows = [{"q": "The capital of France is", "a": " Paris"}, {"q": "1, 2, 3,", "a": " 4"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_text(
        "task: trees\ndataset_path: json\noutput_type: loglikelihood\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: '{{{{a}}}}'\n"
        "target_delimiter: ''\nmetric_list: [{metric: perplexity}, {metric: acc}]\n"
    )
    options = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,tokenized_requests=True"
    manager = TaskManager(include_path=home, include_defaults=False)
    found = simple_evaluate("local-completions", options, tasks=["trees"], task_manager=manager, bootstrap_iters=0)
accuracy = found["results"]["trees"]["acc,none"]
assert accuracy == 1, found["results"]
print(f"accuracy {accuracy} with the remote tokenizer")

"""DSPy: a model by chats and by responses."""

import sys

import dspy

url, model = sys.argv[1:]
for kind in ("chat", "responses"):
    lm = dspy.LM(f"openai/{model}", api_base=f"{url}/v1", api_key="none", model_type=kind, max_tokens=32, cache=False)
    assert lm("Name a tree.")
print("chats, responses")

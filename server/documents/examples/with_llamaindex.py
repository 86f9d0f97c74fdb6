"""LlamaIndex: its messages hold no parts of other kinds, so that `extra_body` has the documents, too.

python with_llamaindex.py [URL [MODEL [METHOD]]]
"""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike

PAPERS = [
    TextNode(text="The river Ambel rises in the hills of Tor. It is 212 kilometres long."),
    TextNode(text="The town of Tor lies at 640 metres. Its market is held on Thursdays."),
    TextNode(text="Sela is a village by the river Ambel, known for its mill."),
]


def main(url: str = "http://127.0.0.1:30000", model: str = "smollm2-135m-instruct", method: str = "a3") -> None:
    llm = OpenAILike(
        **{"api_base": f"{url}/v1", "api_key": "none", "model": model, "is_chat_model": True},
        **{"temperature": 0, "max_tokens": 24},
    )
    for first in range(len(PAPERS)):
        documents = [{"text": node.get_content()} for node in PAPERS[first:] + PAPERS[:first]]
        answer = llm.chat(
            [ChatMessage(role="user", content="On which day is the market of Tor?")],
            extra_body={"documents": documents, "reuse": {"method": method}},
        )
        print(answer.message.content, answer.raw.model_extra["reuse"], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

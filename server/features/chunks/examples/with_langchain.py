"""LangChain sends documents as parts of a message; `extra_body` chooses the reuse method.

python with_langchain.py [URL [MODEL [METHOD]]]
"""

import sys

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

# Documents are reused from 32 tokens on.
PAPERS = [
    Document(
        "The river Ambel rises in the hills of Tor. It is 212 kilometres long, passes four mills and two towns, and "
        "reaches the sea at Port Ennet, where ships have loaded flour since the year 1640.",
        metadata={"title": "Ambel"},
    ),
    Document(
        "The town of Tor lies at 640 metres. Its market is held on Thursdays on the square before the old bell tower, "
        "and farmers bring wool, cheese and honey from the hills around it.",
        metadata={"title": "Tor"},
    ),
    Document(
        "Sela is a village by the river Ambel, known for its mill. The mill has three wheels, of which one turns, "
        "and a bakery that sells its bread on Mondays and Fridays.",
        metadata={"title": "Sela"},
    ),
]


def message_of(documents: list[Document], question: str) -> HumanMessage:
    """A message with the documents before the question."""
    parts = [
        {"type": "document", "document": {"title": one.metadata["title"], "text": one.page_content}}
        for one in documents
    ]
    return HumanMessage([*parts, {"type": "text", "text": question}])


def main(url: str = "http://127.0.0.1:30000", model: str = "smollm2-135m-instruct", method: str = "a3") -> list[str]:
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=24,
        extra_body={"reuse": {"method": method}},
    )
    answers = []
    for first in range(len(PAPERS)):
        documents = PAPERS[first:] + PAPERS[:first]
        answer = chat.invoke([message_of(documents, "On which day is the market of Tor?")])
        usage = answer.usage_metadata
        assert usage is not None
        cached = usage["input_token_details"].get("cache_read")
        print(f"{cached} of {usage['input_tokens']} tokens from the cache: {answer.text!r}")
        answers.append(str(answer.text))
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])

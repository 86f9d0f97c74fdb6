"""Images on their way to the engine, and to a router of replicas."""

import asyncio
import json
import threading
from array import array
from base64 import b64encode
from concurrent.futures import CancelledError

import msgspec
import pytest

from radix import Namespace
from radix.hashes import block_hashes
from runtime.config import make_config
from runtime.fair_threads import FairThreads
from runtime.features.images.client import Images
from runtime.features.images.decoding import PROCESSES
from runtime.frontend.output import Submission
from runtime.params import SamplingParams
from runtime.protocol import AddRequest, encode
from server.anthropic.prompt import chat_of
from server.anthropic.types import MessagesRequest
from server.auth.keys import ANYONE
from server.ray.hasher import PromptHasher
from tests.runtime.features.images.seeing import file_of, picture
from tests.runtime.frontend.test_common_parameters import opened
from tests.runtime.frontend.test_request_ids import INFO

_INFO = msgspec.structs.replace(INFO, page_size=4, vocab_size=50_000)
A, B = file_of(picture(1, 100, 80)), file_of(picture(2, 40, 90))


def test_completions_share_the_file_of_an_image(sight):
    images = Images(sight, "", "messages")
    prompt = Submission(images.add(A), SamplingParams(n=8), images=images)
    _, first, *others = opened(sight.tokenizer, [prompt], info=_INFO)
    assert first.images.files == [A]
    assert len(others) == 7
    assert all(isinstance(one, AddRequest) and not one.images.files for one in others)
    assert sum(len(encode(message)) for message in others) < 7 * (len(first.tokens) + 300)


def test_a_router_tells_images_apart(sight, seeing_dir):
    """Its hashes are those of the replicas' trees."""
    hasher = PromptHasher(make_config(model=str(seeing_dir), page_size=4), _INFO)

    def body(data: bytes) -> bytes:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + b64encode(data).decode()}}
        content = [image, {"type": "text", "text": "What is it?"}]
        return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()

    async def found() -> list[list[int]]:
        await hasher.start()
        several = [await hasher.hashes("POST", "/v1/chat/completions", body(data), ANYONE) for data in (A, B)]
        return [array("Q", one).tolist() for one in several]

    first, second = asyncio.run(found())
    images = Images(sight, "", "messages")
    text = f"<|im_start|>User:{images.add(A)}What is it?<end_of_utterance>\nAssistant:"
    tokens = array("i", images.encode(text, False)).tobytes()
    assert first == list(block_hashes(tokens, 16, None, Namespace()))
    assert len({*first} & {*second}) <= 1


def test_bytes_of_anthropics_images_become_no_url():
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(A).decode()}
    image = {"type": "image", "source": source}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
    (part,) = chat_of(MessagesRequest.model_validate(body)).messages[0].images
    assert part.image_url is None


def test_salts_share_no_decoding(sight, monkeypatch):
    orders, decode = [], PROCESSES.decode
    monkeypatch.setattr(PROCESSES, "decode", lambda order: (orders.append(order), decode(order))[1])
    for salt in ("one", "two", "one"):
        own = sight.pictures("salted", "messages", salt)
        own.encode(own.add(file_of(picture(77, 20, 20))))
    assert len(orders) == 2


def test_no_further_image_is_decoded_for_a_client_that_is_gone(sight, monkeypatch):
    orders, decode, threads, began = [], PROCESSES.decode, FairThreads(1, "test"), threading.Event()
    images = sight.pictures("gone", "messages")
    text = "".join(images.add(file) for file in (A, B))

    def leave(order):
        orders.append(order)
        piece.is_wanted = False
        return decode(order)

    monkeypatch.setattr(PROCESSES, "decode", leave)
    piece = threads.submit("gone", lambda: began.wait() and images.read(text))
    began.set()
    with pytest.raises(CancelledError):
        piece.result(60)
    assert len(orders) == 1

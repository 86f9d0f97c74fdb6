"""Images in the bodies of all APIs, and what the server refuses."""

import base64
import hashlib
import io
import struct
import zlib

import httpx
import pytest
from PIL import Image

from tests.runtime.features.images.conftest import seeing, seeing_dir
from tests.runtime.features.images.seeing import file_of, picture
from tests.server.conftest import start, stop
from tests.server.http.test_image_hosts import serving

__all__ = ["seeing", "seeing_dir"]

A, B = picture(1, 100, 80), picture(2, 40, 90)
NEW = 6
_SHARED = {"temperature": 0}


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(image: Image.Image) -> dict:
    return {"type": "image_url", "image_url": {"url": url_of(file_of(image))}}


def text(said: str) -> dict:
    return {"type": "text", "text": said}


@pytest.fixture(scope="module")
def web():
    """The URL of a server that has image A, at /a.png."""
    with serving({"/a.png": (200, {}, file_of(A))}) as url:
        yield url


@pytest.fixture(scope="module")
def sees(seeing_dir, tmp_path_factory, web):
    log, hosts = tmp_path_factory.mktemp("sees") / "log", ("--image-hosts", "127.0.0.1")
    server = start(log, "--model", str(seeing_dir), "--pool-tokens", "8192", "--debug-invariants", *hosts)
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    server.check_idle()
    assert stop(server) == 0
    assert "Traceback" not in log.read_text()


def chat(client: httpx.Client, content: list | str, **more) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW, **_SHARED, **more}
    return client.post("/v1/chat/completions", json=body)


def rendered(content: str) -> str:
    return f"<|im_start|>User:{content}<end_of_utterance>\nAssistant:"


@pytest.fixture(scope="module")
def expected(seeing):
    """The text that follows a picture and a question."""
    tokens = seeing.greedy(rendered("<image>What is it?"), [A], NEW)
    return tokens, seeing.processor.tokenizer.decode(tokens, skip_special_tokens=True)


def tiles(client: httpx.Client) -> int:
    return client.get("/server_info").json()["state"]["image_tiles"]


def test_a_chat(sees, seeing, expected):
    content = [part(A), text("What is it?")]
    first = chat(sees, content, return_token_ids=True).json()
    assert first["choices"][0]["token_ids"] == expected[0]
    wanted = seeing.inputs(rendered("<image>What is it?"), [A])["input_ids"][0].tolist()
    assert first["prompt_token_ids"] == wanted, "clients see the token of an image, and not its digest"
    assert "left_out" not in first
    before = tiles(sees)
    again = chat(sees, content, explain=True).json()
    assert again["choices"][0]["message"]["content"] == expected[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    assert tiles(sees) == before
    other = chat(sees, [part(B), text("What is it?")], explain=True).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    assert sees.get("/cache/tree").status_code == 200


def test_a_text_that_names_the_token_is_no_image(sees, seeing):
    content = [text("Is <image> a tag?"), part(A), text("And what is this?")]
    found = chat(sees, content, return_token_ids=True).json()
    token = seeing.model.config.image_token_id
    assert found["prompt_token_ids"].count(token) == 5 * 16 + 1


def test_two_turns_read_what_the_first_has_computed(sees):
    # The model's own answers are no UTF-8. The template writes a space before an answer, where it has sampled one.
    letters = {"structured_outputs": {"regex": " [a-z]{8}"}}
    first = chat(sees, [part(A), text("Look closely.")], **letters).json()
    turns = [
        {"role": "user", "content": [part(A), text("Look closely.")]},
        {"role": "assistant", "content": first["choices"][0]["message"]["content"].strip()},
        {"role": "user", "content": [text("And this?"), part(B)]},
    ]
    before = tiles(sees)
    body = {"messages": turns, "max_tokens": NEW, **_SHARED}
    second = sees.post("/v1/chat/completions", json=body).json()
    usage = second["usage"]["prompt_tokens_details"]
    assert usage["cached_tokens"] >= first["usage"]["prompt_tokens"] // 16 * 16
    assert usage.get("replayed_tokens", 0) > 0
    assert tiles(sees) - before <= 3, "the first image is not computed again"


def test_images_of_a_listed_host(sees, web, expected):
    """Through all APIs."""
    url = f"{web}/a.png"
    image = {"type": "image_url", "image_url": {"url": url}}
    assert chat(sees, [image, text("What is it?")]).json()["choices"][0]["message"]["content"] == expected[1]
    body = {"model": "tiny-idefics3", "max_tokens": NEW, **_SHARED}
    image = {"type": "image", "source": {"type": "url", "url": url}}
    messages = [{"role": "user", "content": [image, text("What is it?")]}]
    found = sees.post("/v1/messages", json={**body, "messages": messages}).json()
    assert found["content"][0]["text"] == expected[1]
    count = sees.post("/v1/messages/count_tokens", json={"messages": messages, "model": "tiny-idefics3"}).json()
    assert count["input_tokens"] > 80
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": NEW, **_SHARED}
    found = sees.post("/v1/responses", json=body).json()
    assert found["output"][0]["content"][0]["text"] == expected[1]
    params = {"max_new_tokens": NEW, "temperature": 0}
    body = {"text": rendered("<image>What is it?"), "image_data": [url], "sampling_params": params}
    assert sees.post("/generate", json=body).json()["output_ids"] == expected[0]
    gone = chat(sees, [{"type": "image_url", "image_url": f"{web}/b.png"}])
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "invalid_image")
    assert "status 404" in gone.json()["error"]["message"]


def test_several_answers_to_one_prompt(sees, expected):
    found = chat(sees, [part(A), text("What is it?")], n=3).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == [expected[1]] * 3


def test_a_jpeg_of_several_pictures_is_a_jpeg(sees):
    """Cameras write them; their first picture is served."""
    file = io.BytesIO()
    A.save(file, "MPO", save_all=True, append_images=[B])
    image = {"type": "image_url", "image_url": {"url": url_of(file.getvalue(), "image/jpeg")}}
    assert chat(sees, [image, text("What is it?")]).status_code == 200


def test_anthropic(sees, expected):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(A)).decode()}
    image = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [image, text("What is it?")]}]
    body = {"model": "tiny-idefics3", "messages": messages, "max_tokens": NEW, **_SHARED}
    found = sees.post("/v1/messages", json=body).json()
    assert found["content"][0]["text"] == expected[1]
    assert "left_out" not in found
    assert found["usage"]["breakpoints"][0]["kept_tokens"] >= 80
    count = sees.post("/v1/messages/count_tokens", json={"messages": messages, "model": "tiny-idefics3"}).json()
    usage = found["usage"]
    assert count == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    }
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image, text("read")]}
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    turns = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    found = sees.post("/v1/messages", json={**body, "messages": turns}).json()
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] > 80
    assert "left_out" not in found


def test_responses(sees, expected):
    content = [{"type": "input_image", "image_url": url_of(file_of(A))}, {"type": "input_text", "text": "What is it?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": NEW, **_SHARED}
    first = sees.post("/v1/responses", json=body).json()
    assert first["output"][0]["content"][0]["text"] == expected[1]
    body = {"input": "And now?", "previous_response_id": first["id"], "max_output_tokens": NEW, **_SHARED}
    second = sees.post("/v1/responses", json=body).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] // 16 * 16


def test_generate(sees, expected):
    params = {"max_new_tokens": NEW, "temperature": 0}
    data, texts = base64.b64encode(file_of(A)).decode(), rendered("<image>What is it?")
    body = {"text": texts, "image_data": data, "sampling_params": params}
    assert sees.post("/generate", json=body).json()["output_ids"] == expected[0]
    batch = {"text": [texts, "Hello"], "image_data": [[url_of(file_of(A))], []], "sampling_params": params}
    assert sees.post("/generate", json=batch).json()[0]["output_ids"] == expected[0]
    whole = sees.post("/generate", json={**body, "return_logprob": True, "logprob_start_len": 0}).json()
    assert whole["error"]["param"] == "image_data"
    few = sees.post("/generate", json={**body, "text": "no image"})
    assert (few.status_code, few.json()["error"]["param"]) == (400, "image_data")


def _png(width: int, height: int) -> bytes:
    """A PNG of a size, whose pixels are a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\0" * (-(-width // 8))) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BAD = {
    "many pixels": (url_of(_png(10_000, 10_000)), "10000 x 10000 pixels"),
    "a bomb": (url_of(_png(60_000, 60_000)[:20_000]), "too many pixels"),
    "long and thin": (url_of(_png(20_000, 1)), "edges"),
    "truncated": (url_of(file_of(A)[:-200]), "cannot be decoded"),
    "no image": (url_of(b"hello"), "none of the served formats"),
    "SVG": (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "none of the served formats"),
    "TIFF": (url_of(file_of(A, "TIFF"), "image/tiff"), "none of the served formats"),
    "polyglot": (url_of(file_of(A, "GIF") + b"<script>", "image/png"), "called image/png"),
    "a web page": ("https://example.com/cat.png", "the operator lists"),
    "a file": ("file:///etc/passwd", "data URL"),
    "another type of a known image": (url_of(file_of(A), "image/webp"), "called image/webp"),
    "no base64": ("data:image/png;base64,@@@", "base64"),
    "nothing": ("", "it has neither"),
    "no padding": (url_of(file_of(A)).rstrip("=") + "A", "padding"),
    "another type": (url_of(b"RIFF\x24\0\0\0WAVEfmt ", "audio/wav"), "none of the served formats"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_served_is_one_error(sees, kind):
    url, reason = BAD[kind]
    found = chat(sees, [text("Look:"), {"type": "image_url", "image_url": {"url": url}}])
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (400, "messages", "invalid_image")
    assert reason in error["message"]


def test_too_many_images_are_refused(sees):
    mark = f"\ue0f0{hashlib.sha256(file_of(A)).hexdigest()}\ue0f1"
    for content in ([part(A)] * 65, [part(A), text(mark * 64)]):
        found = chat(sees, content)
        assert found.status_code == 400
        assert "more than 64 images" in found.json()["error"]["message"]


def test_prompts_are_tokenized_and_written_with_images(sees):
    body = {"messages": [{"role": "user", "content": [part(A), text("Is <image> it?")]}]}
    found = chat(sees, body["messages"][0]["content"], return_token_ids=True).json()["prompt_token_ids"]
    assert sees.post("/tokenize", json=body).json()["tokens"] == found
    refused = sees.post("/cache/pin", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert sees.post("/apply-template", json=body).json()["prompt"] == rendered("<image>Is <image> it?")


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"truncate_prompt_tokens": 8}])
def test_what_images_exclude(sees, more):
    found = chat(sees, [part(A), text("x")], **more)
    assert found.status_code == 400
    assert "images are not served" in found.json()["error"]["message"]


def test_an_approximate_way_of_reuse_is_refused(sees):
    """Whether a chat has images is known once it is rendered."""
    found = chat(sees, [part(A), text("x")], reuse={"method": "reasoncache"})
    assert found.status_code == 400
    assert found.json()["error"]["message"] == "reasoncache is not served with images"


@pytest.mark.parametrize("beside", [{"detail": "low"}, {"max_pixels": 9}])
def test_what_is_asked_beside_a_url_is_listed(sees, beside):
    given = part(A)
    given["image_url"] |= beside
    found = chat(sees, [given, given]).json()
    assert found["left_out"] == [f"image_url.{name}" for name in beside]
    assert "left_out" not in chat(sees, [given | {"image_url": given["image_url"] | dict.fromkeys(beside)}]).json()


def test_a_model_that_reads_text_alone_leaves_images_out(client):
    found = chat(client, [part(A), text("What is it?")]).json()
    assert found["left_out"] == ["content image_url"]
    body = {"messages": [{"role": "user", "content": [part(A)]}]}
    assert client.post("/tokenize", json=body).json()["left_out"] == ["content image_url"]
    refused = client.post("/generate", json={"text": "<image>", "image_data": "AAAA"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "image_data is not supported"

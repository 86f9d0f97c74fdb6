"""Pictures in the page's chat."""

import base64
import io
import json

import pytest
from PIL import Image

from tests.runtime.features.images.conftest import seeing_dir
from tests.runtime.features.images.seeing import file_of, picture
from tests.server.conftest import start, stop

__all__ = ["seeing_dir"]

# An event with a file, as a browser makes it of a paste or a drop.
_GIVE = """(element, [kind, name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const more = kind === "paste" ? { clipboardData: transfer } : { dataTransfer: transfer };
  const made = kind === "paste" ? ClipboardEvent : DragEvent;
  element.dispatchEvent(new made(kind, { bubbles: true, cancelable: true, ...more }));
}"""
A, B = file_of(picture(1, 100, 80)), file_of(picture(2, 40, 90))


def wait_until_it_knows_the_server(page):
    """Evaluated from outside: the page's policy refuses the function that `wait_for_function` would leave in it."""
    while not page.evaluate("served !== null"):
        page.wait_for_timeout(20)


def give(page, kind: str, data: bytes, name: str = "shot.png", media_type: str = "image/png") -> None:
    where = page.locator("#prompt")
    where.evaluate(_GIVE, [kind, name, media_type, base64.b64encode(data).decode()])


@pytest.fixture(scope="module")
def sees(seeing_dir, tmp_path_factory):
    server = start(tmp_path_factory.mktemp("sees") / "log", "--model", str(seeing_dir), "--pool-tokens", "4096")
    yield server
    assert stop(server) == 0


def test_a_large_picture_is_sent_smaller(page, sees):
    page.goto(sees.url)
    wait_until_it_knows_the_server(page)
    large = file_of(Image.effect_noise((2200, 1100), 90))
    give(page, "paste", large)
    shown = page.locator("#pictures img")
    shown.wait_for()
    url = shown.get_attribute("src")
    assert len(large) > 1 << 21
    assert Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == (2048, 1024)
    give(page, "paste", bytes(3_000_000))
    page.locator("#told", has_text="cannot be read").wait_for()


def test_pictures_are_pasted_dropped_chosen_removed_and_sent(page, sees):
    page.goto(sees.url)
    page.locator("#model", has_text="tiny-idefics3").wait_for()
    wait_until_it_knows_the_server(page)
    give(page, "paste", A)
    give(page, "drop", B)
    thumbs = page.locator("#pictures img")
    thumbs.nth(1).wait_for()
    page.locator("#picturefile").set_input_files({"name": "c.png", "mimeType": "image/png", "buffer": A})
    thumbs.nth(2).wait_for()
    page.get_by_label("Remove picture 3").click()
    assert thumbs.count() == 2
    give(page, "drop", b"<svg/>", "a.svg", "image/svg+xml")
    page.locator("#told", has_text="a.svg is no picture that is served").wait_for()
    page.locator("#prompt").fill("What is it?")
    page.locator("#tokens").fill("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    (message,) = json.loads(sent.value.post_data)["messages"]
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in (A, B)]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert message["content"] == [*images, {"type": "text", "text": "What is it?"}]
    page.locator(".turn .figures").wait_for()
    assert page.locator(".turn .bad").count() == 0
    assert page.locator(".turn.user img").count() == 2
    assert thumbs.count() == 0
    page.reload()
    page.locator(".turn .figures").wait_for()
    assert page.locator(".turn.user img").count() == 2
    page.get_by_role("button", name="Take back").click()
    assert thumbs.count() == 2
    page.get_by_label("plain text").check()
    assert not thumbs.first.is_visible()


def test_a_model_that_does_not_see_says_so(page, server):
    page.goto(server.url)
    wait_until_it_knows_the_server(page)
    give(page, "paste", A)
    page.locator("#told", has_text="reads text alone: it does not see pictures").wait_for()
    assert page.locator("#pictures img").count() == 0

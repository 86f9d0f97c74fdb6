"""The page of a diffusion model in a real browser: its canvas, and its chat."""

from itertools import pairwise

import httpx

from tests.server.admin.test_page import SAYING, open_plain


def test_the_canvas_is_shown_as_it_denoises(page, denoiser):
    httpx.post(f"{denoiser.url}/flush_cache")
    open_plain(page, denoiser.url)
    page.locator("#more").evaluate("(more) => more.open = true")
    page.locator("#steps").wait_for()
    assert page.locator("#algorithm").input_value() == "low_confidence", "the model's own"
    prompt = SAYING + "So what did they eat?"
    fields = {"prompt": prompt, "tokens": "96", "steps": "48", "block": "8", "shared": "16"}
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)
    page.evaluate("""() => new MutationObserver(() => window.seen.push(
        [...document.querySelectorAll("#canvas:not([hidden]) .cell")].map(
            (cell) => cell.matches(".mask") ? null : cell.textContent)
    )).observe(document.getElementById("told"), { childList: true })""")
    for attempt in range(6):
        cached = 16 * bool(attempt)
        page.evaluate("() => { window.seen = [] }")
        page.get_by_role("button", name="Send").click()
        page.locator("#told", has_text="after 48 steps").wait_for()
        page.locator("#stop:disabled").wait_for()
        told = page.locator("#told").text_content()
        assert told.startswith(f"{cached} of ")
        assert ("reused in 1 of 4 layers" in told) == (cached > 0)
        seen = [cells for cells in page.evaluate("window.seen") if cells]
        masked = [sum(text is None for text in cells) for cells in seen]
        if attempt and len(masked) > 1:  # a reader that stood still had all steps at once, and has another try
            break
    assert set(masked) <= set(range(0, 95, 2)), "each step decides two"
    assert masked == sorted(set(masked), reverse=True)
    assert masked[-1] == 0
    assert len(masked) > 1, "a reader that is behind gets several steps at once, but the last is not all it sees"
    for cells in seen:
        first = cells.index(None) if None in cells else 96
        assert not any(cells[first // 8 * 8 + 8 :]), "blocks from left to right"
    for earlier, later in pairwise(seen):
        assert all(a in (None, b) for a, b in zip(earlier, later, strict=True)), "what is decided stays"
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 96, "temperature": 0, "ignore_eos": True}}
    settings = {"steps": 48, "block_length": 8, "prefix_tokens": 16}
    ids = httpx.post(f"{denoiser.url}/generate", json=body | {"diffusion": settings}, timeout=60).json()["output_ids"]
    pieces = {"tokens": [[token] for token in ids], "skip_special_tokens": False}
    assert [text.replace("\u23ce", "\n").replace("\u21e5", "\t") for text in seen[-1]] == httpx.post(
        f"{denoiser.url}/detokenize", json=pieces
    ).json()["text"]
    parts = [page.locator(f"#answer .{kind}").text_content() for kind in ("reused", "computed")]
    assert "".join(parts) == prompt
    assert len(parts[0]) > 20
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        reused, computed = (
            page.locator(f"#answer .{kind}").evaluate("(part) => getComputedStyle(part).backgroundColor")
            for kind in ("reused", "computed")
        )
        assert reused != computed
    assert page.locator("#canvas").get_attribute("aria-label") == "96 of 96 positions decided"
    page.locator("#stream").set_checked(False)
    page.get_by_role("button", name="Send").click()
    page.locator("#told", has_text="after 48 steps").wait_for()
    assert page.locator("#canvas").is_hidden()


def test_a_diffusion_model_has_a_chat(page, denoiser):
    page.goto(denoiser.url)
    page.locator("#examples button").first.click()
    page.locator("#more summary").click()
    for name, value in {"tokens": "16", "steps": "4", "block": "8"}.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_role("button", name="Send").click()
    page.locator(".turn .figures", has_text="16 generated after 4 steps").wait_for()
    assert page.locator("#canvas .cell:not(.mask)").count() == 16
    page.locator(".turn details summary").click()
    page.locator(".turn pre", has_text="<|im_start|>user").wait_for()

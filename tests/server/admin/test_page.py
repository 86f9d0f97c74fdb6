"""The page in a real browser: headless Chromium, driven by playwright."""

import json
import random
import shutil
import subprocess
import sys

import httpx
import pytest

from tests.runtime.execution.mixers.models import save_hybrid
from tests.server.conftest import start, stop
from tests.tiny import WITH_TOKENIZER

SAYING = (
    "Seven bakers argued about one loaf until the bell rang, and after that there was nothing left to argue about. "
)


def generate(url, text, key=None, hold_s=None):
    body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}, "cache": {"hold_s": hold_s}}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    httpx.post(f"{url}/generate", json=body, headers=headers, timeout=120).raise_for_status()


def open_plain(page, url):
    """The page with the playground's form for plain text."""
    page.goto(url)
    page.get_by_label("plain text").check()


def block(page, text):
    """The tree's rectangle whose label begins with a text."""
    page.locator("#icicle text", has_text=text).first.wait_for()
    return page.locator("#icicle rect[data-name]:not([data-name^='-1@'])").first


def test_the_tree_is_drawn_and_a_node_pinned_unpinned_and_evicted(page, server):
    httpx.post(f"{server.url}/flush_cache")
    generate(server.url, SAYING * 2, hold_s=600)
    page.goto(server.url)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        background = page.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(", "))) > 384) == (scheme == "light")
    rect = block(page, "Seven bakers")
    text = page.locator("#nodetext", has_text="Seven bakers argued")
    for _ in range(100):  # a tree that is drawn again leaves a pointer that does not move
        rect.hover(position={"x": random.uniform(2, 20), "y": 4})
        page.wait_for_timeout(500)
        if text.is_visible():
            break
    text.wait_for()
    assert "held for 10 min" in page.locator("#tip").inner_text()
    page.locator("#chart-pool .value", has_text="% held").wait_for()
    rect.click()
    page.locator("#node", has_text="a hold for").wait_for()
    page.locator("#icicle rect[data-held]").first.wait_for()
    page.get_by_role("button", name="Pin", exact=True).click()
    page.locator("#icicle rect[data-pinned]").first.wait_for()
    assert len(httpx.get(f"{server.url}/cache/pins").json()["pins"]) == 1
    page.locator("#node").get_by_role("button", name="Unpin").click()
    page.locator("#icicle rect[data-pinned]").first.wait_for(state="detached")
    assert httpx.get(f"{server.url}/cache/pins").json()["pins"] == []
    page.get_by_role("button", name="Evict").click()
    page.locator("#said", has_text="tokens evicted").or_(page.locator("#node", has_text="is gone")).first.wait_for()
    assert httpx.get(f"{server.url}/cache/stats").json()["pages_tree"] == 0


def test_resume_points_are_marked_where_they_lie(page, default_model_dir, tmp_path):
    path = save_hybrid("Lfm2", tmp_path / "tiny-lfm2", vocab_size=WITH_TOKENIZER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_dir / name, path)
    server = start(tmp_path / "log", "--model", str(path), "--pool-tokens", "4096")
    for end in ("They went one by one.", "Nobody went."):
        generate(server.url, SAYING * 4 + end)
    page.goto(server.url)
    mark = page.locator("#icicle [data-points]").first
    mark.wait_for()
    page.locator("#treekey", has_text="resume point at its end").wait_for()
    block(page, "Seven bakers").hover()
    page.locator("#node dt", has_text="resume points").locator("+ dd", has_text="at its end").wait_for()
    assert "at its end" in page.locator("#tip").inner_text()
    page.locator("#icicle rect[aria-label^='resume point']").first.hover()
    page.locator("#node dd", has_text="resume point behind").wait_for()
    page.locator("#node dd", has_text="that of ").wait_for()
    page.goto("about:blank")  # else it asks for events again while the server ends
    assert stop(server) == 0


def test_figures_and_requests_move(page, server):
    open_plain(page, server.url)
    page.locator("#chart-pool .value", has_text="% cached").wait_for()
    page.locator("#tokensname", has_text="new tokens").wait_for()
    assert page.locator("#steps").is_hidden(), "fields of diffusion models are theirs alone"
    assert page.locator("#algorithm").is_hidden()
    page.locator("#prompt").fill("Once upon a time there lived")
    page.locator("#tokens").fill("2000")
    page.get_by_role("button", name="Send").click()
    page.locator("#told", has_text="generated").wait_for()
    with server.paused():
        page.locator("#requests td", has_text="decode").first.wait_for()
        page.locator("#chart-requests .value", has_text="1 running").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.locator("#chart-requests .value", has_text="0 running").wait_for()
    assert page.locator("#chart-requests path").count() == 2


@pytest.mark.parametrize("stream", [True, False])
def test_the_playground_shows_what_was_reused(page, server, stream):
    httpx.post(f"{server.url}/flush_cache")
    prompt = SAYING + "So what did they eat?"
    open_plain(page, server.url)
    page.locator("#more").evaluate("(more) => more.open = true")
    page.locator("#prompt").fill(prompt)
    page.locator("#tokens").fill("5")
    page.locator("#stream").set_checked(stream)
    shown = []
    for _ in range(2):
        page.get_by_role("button", name="Send").click()
        page.locator("#told", has_text="5 generated").wait_for()
        page.locator("#stop:disabled").wait_for()
        shown.append([page.locator(f"#answer .{kind}").text_content() for kind in ("reused", "computed")])
        shown[-1].append(page.locator("#output").text_content())
        page.locator("#told").evaluate("(told) => told.textContent = ''")
    (_, cold, first), (warm, rest, second) = shown
    assert cold == warm + rest == prompt
    assert SAYING.startswith(warm[:20])
    assert len(warm) > len(SAYING) // 2
    assert first == second
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    assert second == httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["text"]


TRIPS = """<schema name="page-trips">You plan.<module name="plan"> For <parameter name="days" length="4"/> days.
<union><module name="rome"> To Rome.</module><module name="oslo"> I go to Oslo.</module></union></module></schema>"""


def test_the_playground_says_why_a_prompt_was_computed(page, server):
    httpx.post(f"{server.url}/flush_cache")
    generate(server.url, f"Monday <b>it</b> is. {SAYING}")
    open_plain(page, server.url)
    page.locator("#tokens").fill("1")
    for day, words in (
        ("Monday <b>it</b> was", "goes on with “was"),
        ("Tuesday", "Nothing of this prompt is in"),
    ):
        page.locator("#prompt").fill(f"{day}. {SAYING}")
        page.get_by_role("button", name="Send").click()
        page.locator("#why", has_text=words).wait_for()
    assert page.locator("#why b").count() == 0


def test_the_playground_imports_modules_which_the_tree_shows_under_their_schema(page, server):
    httpx.post(f"{server.url}/flush_cache")
    httpx.post(f"{server.url}/v1/schemas", json={"pml": TRIPS}).raise_for_status()
    open_plain(page, server.url)
    page.locator("#schema option", has_text="page-trips").wait_for(state="attached")
    page.locator("#schema").select_option("page-trips")
    page.get_by_label("/plan/rome", exact=True).check()
    page.get_by_label("/plan/oslo", exact=True).check()
    picked = {path: page.get_by_label(path, exact=True).is_checked() for path in ("/plan", "/plan/rome", "/plan/oslo")}
    assert picked == {"/plan": True, "/plan/rome": False, "/plan/oslo": True}
    page.get_by_label("/plan days").fill('"<3"')
    page.locator("#tokens").fill("2")
    shown = []
    for text in (" Where & when?" * 8, " And then?" * 8):
        page.locator("#prompt").fill(text)
        page.get_by_role("button", name="Send").click()
        page.locator("#told", has_text="2 generated").wait_for()
        page.locator("#stop:disabled").wait_for()
        shown.append([page.locator(f"#answer .chip.{kind}").all_inner_texts() for kind in ("reused", "computed")])
        page.locator("#told").evaluate("(told) => told.textContent = ''")
        page.get_by_label("/plan/rome", exact=True).check()
    (cold, computed), (warm, rest) = shown
    names = [[chip.rpartition(" ")[0] for chip in chips] for chips in (cold, computed, warm, rest)]
    assert names == [[], ["/", "/plan", "/plan/oslo", "own text"], ["/", "/plan"], ["/plan/rome", "own text"]]
    for label in ("/plan/oslo I go to Oslo", "And then?"):
        page.locator(f"#icicle rect[aria-label*='{label}']").wait_for()
    roots = page.locator("#icicle rect[data-name^='-1@']").evaluate_all("(all) => all.map((one) => one.dataset.name)")
    assert sorted(roots) == ["-1@", "-1@schema%20page-trips"]
    page.get_by_label("/plan", exact=True).uncheck()
    assert not page.get_by_label("/plan/rome", exact=True).is_checked()
    httpx.delete(f"{server.url}/v1/schemas/page-trips").raise_for_status()


def test_text_is_never_markup(page, server):
    httpx.post(f"{server.url}/flush_cache")
    evil = "<img src=x onerror=alert(1)><script>document.title='owned'</script> " + SAYING
    generate(server.url, evil)
    open_plain(page, server.url)
    block(page, "<img").click()
    page.locator("#prompt").fill(evil)
    page.locator("#tokens").fill("3")
    page.get_by_role("button", name="Send").click()
    page.locator("#told", has_text="3 generated").wait_for()
    assert "<img src=x" in page.locator("#answer").text_content()
    assert page.locator("img").count() == 0
    assert page.title() == "Ramet"
    httpx.post(f"{server.url}/flush_cache")


def test_no_text_without_an_admins_key(page, guarded):
    httpx.post(f"{guarded.url}/flush_cache", headers={"X-API-Key": "boss-secret-key"}).raise_for_status()
    generate(guarded.url, SAYING, "alice-secret-key")
    page.goto(guarded.url)
    page.locator("#status", has_text="an API key is needed").wait_for()
    page.locator("#keywanted", has_text="Type yours into the field").wait_for()
    assert "bakers" not in page.content()
    assert page.locator("#rooms").is_hidden(), "no empty boxes"
    page.locator("#key").fill("no-such-secret-key")
    page.get_by_role("button", name="Use").click()
    page.locator("#status", has_text="this API key is not known").wait_for()
    page.locator("#key").fill("alice-secret-key")
    page.get_by_role("button", name="Use").click()
    page.locator("#quota", has_text="Cache of alice").wait_for()
    assert page.locator("#keywanted").is_hidden()
    page.locator("#icicle text", has_text="alice").first.wait_for()
    page.locator("#finished td", has_text="alice").first.wait_for()
    block(page, "tokens").click()
    page.locator("#node dt", has_text="hits").wait_for()
    assert page.get_by_role("button", name="Evict").count() == 0
    assert page.locator("#figures").is_hidden()
    assert "bakers" not in page.content()
    page.locator("#key").fill("boss-secret-key")
    page.get_by_role("button", name="Use").click()
    page.locator("#status", has_text="live").wait_for()
    block(page, "Seven bakers")
    page.locator("#icicle text", has_text="alice").wait_for()


def test_it_stays_quick_with_a_hundred_thousand_nodes(page, server):
    """The stream of such a tree, played to the page: a root of 100,000 nodes of which 500 are shown."""
    figures = {"at_s": 1e9, "running": 0, "waiting": 0, "pages_total": 10**6, "pages_free": 0, "pages_tree": 10**6,
               "pages_private": 0, "pages_locked": 0, "pages_pinned": 0, "tree_nodes": 10**5, "queried_tokens": 0,
               "cached_tokens": 0, "requests": [], "finished": [], "evicted_tokens_by_cause": {"room": 48},
               "evicted_tokens_by_tenant": {"alice": 48}, "missed_tokens_by_reason": {"new": 7, "room": 5},
               "substituted_pages": 5, "saved_pages": 2, "tokens_per_s": 0, "ttft_p50_s": None,
               "ttft_p95_s": None}  # fmt: skip
    refused = {"rid": "r", "tenant": "", "at_s": 1e9, "finish": "timeout_error", "error": "it took too long"}
    refused |= {"e2e_s": 2} | {
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "output_tokens": 1,
        "queue_s": 0,
        "prefill_s": 0.1,
    }
    figures |= {"finished": [refused]}
    before = figures | {"at_s": 1e9 - 60, "evicted_tokens_by_cause": {"room": 0}, "missed_tokens_by_reason": {}}
    common = {"tenant": "", "salt": "", "kind": "", "cost_s": 0.1, "chained": 1, "hits": 1, "locked": False}
    common |= {"pinned": False, "meta": None, "preview": "text", "idle_s": 5, "held_s": 0}
    root = common | {"id": -1, "end": [-1, 0], "start": 0, "tokens": 0, "total": 16 * 10**6, "nodes": 10**5}
    root |= {"parent": None, "chained": 0}
    size = {"tokens": 16000, "total": 16000, "nodes": 100, "chained": 100, "parent": 0}
    rest = [common | size | {"id": i, "end": [i, 0], "start": 0} for i in range(499)]
    outlook = {"kind": "turn 2, mean gap below 64 uses", "age": 40, "promise": 0.0012}
    gone = {"tenant": "alice", "cause": "room", "pages": 1, "kept_pages": 8, "idle_s": 61.4, "outlook": outlook}
    rest[0]["outlook"] = outlook
    rest[1] |= {"outlook": outlook, "total": 16001}  # above another node
    measured = {"10": {"depth": {"2": 0.0, "4": 0.0123}}}
    meta = {"encoded_tokens": 32, "depth_table": "t", "depths": {"0": 1}, "similarity": {}}
    rest[2]["meta"] = meta | {"measured": measured}
    evictions = [gone | {"outlook": None}, gone]
    tree = {"blocks": [root, *rest], "evictions": evictions, "pins": [], "pinned_tokens": 0, "budget_tokens": 0}
    told_events = ({"history": [before]}, {"figures": figures}, {"tree": tree})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in told_events)
    page.route("**/dashboard/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.set_viewport_size({"width": 2000, "height": 1100})  # a pixel and more for each node
    page.goto(server.url)
    page.locator("#treefigures", has_text="16,000,000 tokens in 100,000 nodes, 49,900 of them shown").wait_for()
    page.locator("#chart-reasoning-steps", has_text="2 pages saved").wait_for()
    last = page.locator("#evictions tr").nth(1).inner_text()
    told = "turn 2, mean gap below 64 uses; 40 uses ago; 1.2 hits a page in 1,000 uses"
    assert page.locator("#finished td.bad").get_attribute("title") == "it took too long"
    assert last.split("\t") == ["alice", "room was needed", "1 of 9", "61 s", told]
    page.locator("#icicle rect").nth(1).dispatch_event("mousemove", {"clientX": 9, "clientY": 9})
    assert f"foreseen: {told}" in page.locator("#tip").inner_text()
    page.locator("#icicle rect").nth(2).dispatch_event("mousemove", {"clientX": 9, "clientY": 9})
    assert "foreseen" not in page.locator("#tip").inner_text()
    page.locator("#icicle rect").nth(3).dispatch_event("mousemove", {"clientX": 9, "clientY": 9})
    depths = "reusable in 1 layers from 0 % of a request (depth table t)"
    told = f"{depths}; measured from 10 %: 0 nats in 2 layers; measured from 10 %: 0.0123 nats in 4 layers"
    assert told in page.locator("#tip").inner_text()
    # Nodes that are not shown, and nodes narrower than a pixel, are drawn as one.
    assert page.locator("#icicle rect").count() == 501
    assert page.locator("#icicle rect[data-rest]").count() == 1
    page.locator("#icicle text", has_text="+50,100").wait_for()
    page.set_viewport_size({"width": 400, "height": 1100})
    page.locator("#icicle text", has_text="+100,000").wait_for()
    assert page.locator("#icicle rect").count() == 2
    page.set_viewport_size({"width": 2000, "height": 1100})
    # Charts have keys, axes, and values on hover.
    page.locator("#chart-missed .legend", has_text="new text").wait_for()
    missed = page.locator("#chart-missed svg")
    missed.focus()
    page.keyboard.press("ArrowLeft")
    tip = page.locator("#tip").inner_text()
    assert ("new text: 7" in tip, "evicted for room: 5" in tip) == (True, True)
    assert "now" in missed.inner_html()
    page.locator("#evictedby").select_option("tenant")
    page.locator("#chart-evicted .legend", has_text="alice").wait_for()


def test_the_tree_is_walked_with_arrow_keys_searched_and_read(page, server):
    httpx.post(f"{server.url}/flush_cache")
    for end in ("They went one by one. " * 9, "Nobody went, not two by two. " * 9):
        generate(server.url, SAYING * 3 + end)
    page.goto(server.url)
    block(page, "Seven bakers").wait_for()
    page.locator("#icicle rect[data-name]").nth(2).wait_for()
    assert page.locator("#icicle [tabindex='0']").count() == 1
    page.locator("#icicle [tabindex='0']").focus()
    for pressed in ("ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        page.keyboard.press(pressed)
    page.locator("#node dd", has_text="after 0").first.wait_for()
    hits = page.locator("#node dt", has_text="hits").locator("+ dd").inner_text()
    assert hits == "1", "the second prompt used what the first one left"
    page.locator("#nodetext", has_text=SAYING.strip() + " " + SAYING.strip()).wait_for()
    page.locator("#icicle [tabindex='0']").focus()
    page.keyboard.press("z")
    page.locator("#crumbs button", has_text="Seven bakers").wait_for()
    page.keyboard.press("Escape")
    page.locator("#crumbs").wait_for(state="hidden")
    page.locator("#search").fill("words that come later")
    page.locator("#icicle rect.faded").first.wait_for()
    generate(server.url, "Some words that come later stand in a prompt that is long enough to fill a page of the pool.")
    page.locator("#found button mark", has_text="words that come later").wait_for()
    page.locator("#search").fill("TWO by two")
    page.locator("#found button mark", has_text="two by two").first.wait_for()
    assert page.locator("#icicle rect.faded").count() == page.locator("#icicle rect[data-name]").count() - 2
    page.locator("#found button").first.click()
    page.locator("#node dt", has_text="tokens").first.wait_for()
    page.locator("#nodetext", has_text="not two by two").wait_for()
    httpx.post(f"{server.url}/flush_cache")


def test_a_chat_shows_what_was_reused_and_why_the_rest_was_not(page, server):
    httpx.post(f"{server.url}/flush_cache")
    page.goto(server.url)
    page.locator("#tokens").fill("6")
    page.locator("#systembox summary").click()
    page.locator("#system").fill(SAYING)
    held = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    for turn, text in enumerate(("<b>Who</b> rang?", "And then?")):
        page.locator("#prompt").fill(text)
        page.keyboard.press("Control+Enter")
        while not held:
            page.wait_for_timeout(10)
        assert page.locator("#send").is_disabled()
        assert page.locator(".turn").last.get_by_role("button").count() == 0, "an answer that is not there yet"
        body = json.loads(held[0].request.post_data)
        reasoning = [message.get("reasoning_content") for message in body["messages"]]
        if not turn:
            body |= {"max_tokens": 40, "structured_outputs": {"regex": "<think>[a-z]{9}</think>[0-9]{5}"}}
        held.pop().continue_(post_data=json.dumps(body))
        page.locator(".turn .figures").nth(turn).wait_for()
    thought = page.locator(".turn .thought:visible").inner_text()
    assert (len(thought), reasoning) == (9, [None, None, thought, None]), "it is shown, and sent back"
    assert len(page.locator(".turn.assistant .said").first.inner_text()) == 5
    page.unroute("**/v1/chat/completions")
    page.locator("#stop:disabled").wait_for()
    first, second = (int(text.split(" ")[0]) for text in page.locator(".turn .figures").all_inner_texts())
    assert first == 0
    assert second > 16, "the first turn is reused by the second"
    assert "Nothing of this prompt is in" in page.locator(".whymissed").first.inner_text()
    assert page.locator(".turn b").count() == 0
    page.locator(".turn details summary").last.click()
    page.locator(".turn pre .computed").wait_for()
    assert page.locator(".turn pre .reused").inner_text().startswith("<|im_start|>system")
    page.locator("#finished td").first.wait_for()
    # The draft, the conversation and the same request elsewhere.
    page.locator("#prompt").fill("it's a 'draft'")
    page.reload()
    page.locator(".turn .figures").nth(1).wait_for()
    assert page.locator("#prompt").input_value() == "it's a 'draft'"
    page.locator("#more summary").click()
    page.get_by_role("button", name="as curl").click()
    shown = page.locator("#code").inner_text()
    assert shown.startswith(f"curl -sN {server.url}/v1/chat/completions")
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, timeout=120)
    assert done.stdout.rstrip().endswith("[DONE]")
    page.get_by_role("button", name="as Python").click()
    compile(page.locator("#code").inner_text(), "page", "exec")
    page.get_by_role("button", name="Take back").click()
    assert page.locator(".turn").count() == 2
    assert page.locator("#prompt").input_value() == "And then?"
    page.get_by_label("plain text").check()
    body = {"text": 'Is it "true" or {false}?', "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
    page.locator("#prompt").fill(body["text"])
    page.get_by_role("button", name="as Python").click()
    done = subprocess.run([sys.executable, "-c", page.locator("#code").inner_text()], capture_output=True, text=True)
    assert done.stdout == httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["text"] + "\n", done.stderr
    httpx.post(f"{server.url}/flush_cache")


def test_the_page_of_the_api_needs_nothing_from_elsewhere(page, server):
    page.goto(f"{server.url}/docs")
    page.locator(".route", has_text="POST /tokenize").locator("summary").click()
    page.locator("td", has_text="add_generation_prompt").wait_for()
    page.get_by_role("button", name="Send POST").click()
    page.locator("pre[role=status]", has_text='"count": 5').wait_for()
    page.locator("#find").fill("no such route")
    assert page.locator(".route:visible").count() == 0

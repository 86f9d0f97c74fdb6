"""Requests as browsers send them for pages of other sites, and for names that lead to this machine."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from loadgen.faults.server import Finding, Server, Wire


class Page(NamedTuple):
    """A page, and what a browser says about it.

    Attributes:
        host: of the server, as the page names it; `{}` is the server's own address.
        passes: whether its requests may be answered.
    """

    name: str
    passes: bool
    host: str = "{}"
    headers: tuple[tuple[str, str], ...] = ()


def _from(origin: str, site: str | None = "cross-site", mode: str = "no-cors") -> tuple[tuple[str, str], ...]:
    """The headers for a page; browsers leave out Sec-Fetch-* for servers that are neither HTTPS nor localhost."""
    told = () if site is None else (("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode))
    return (("Origin", origin), *told) if origin else told


_PAGES = [
    Page("no page: curl, a client library", True),
    Page("the server's own page", True, headers=_from("http://{}", "same-origin", "cors")),
    Page("the server's own page, no Sec-Fetch-Site", True, headers=_from("http://{}", None)),
    Page("the server's own page behind a proxy that ends TLS", True, headers=_from("https://{}", None)),
    Page("the address typed into a browser", True, headers=_from("", "none", "navigate")),
    Page("another site", False, headers=_from("https://b.example")),
    Page("another site, no Sec-Fetch-Site", False, headers=_from("http://b.example", None)),
    Page("another port of this machine", False, headers=_from("http://127.0.0.1:1", "same-site")),
    Page("another port, no Sec-Fetch-Site", False, headers=_from("http://127.0.0.1:1", None)),
    Page("the server's own page behind a proxy that ended TLS", True, headers=_from("https://{}", None)),
    Page("a file or a sandboxed frame", False, headers=_from("null")),
    Page("a file or a sandboxed frame, no Sec-Fetch-Site", False, headers=_from("null", None)),
    Page("a name that was rebound", False, "b.example", _from("http://b.example", "same-origin", "cors")),
    Page("a name that was rebound, no Sec-Fetch-Site", False, "b.example", _from("http://b.example", None)),
    Page("a name that was rebound, a GET", False, "b.example"),
]

# Method, path, body, and the status for those who may. The last ones change what the server does.
_ROUTES = [
    ("POST", "/generate", '{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}', 200),
    ("POST", "/v1/completions", '{"model": "MODEL", "prompt": [1], "max_tokens": 1}', 200),
    ("POST", "/tokenize", '{"prompt": "x"}', 200),
    ("GET", "/server_info", "", 200),
    ("GET", "/health_generate", "", 200),
    ("POST", "/flush_cache", "", 200),
    ("POST", "/pause", "", 200),
    ("POST", "/resume", "", 200),
]


_REFUSED = (403, 421)


async def pages(server: Server, scale: float, draw: random.Random) -> Finding:
    """Every page's request to every route; those of foreign pages must be refused, by GET as by POST."""
    model = (await server.get("/model_info"))["served_model_name"]
    rows: list[list[str]] = [["page", *(f"{method} {path}" for method, path, *_ in _ROUTES), "GET /flush_cache"]]
    problems = []
    for page in _PAGES:
        cells = [page.name]
        for method, path, body, status in _ROUTES:
            got = await _ask(server, page, method, path, body.replace("MODEL", model))
            cells.append(str(got))
            if got != status and (page.passes or got not in _REFUSED):
                problems.append(f"{page.name}: {method} {path} is answered with {got}")
        got = await _ask(server, page, "GET", "/flush_cache", "")
        cells.append(str(got))
        if got == 200 and not page.passes:
            problems.append(f"{page.name}: GET /flush_cache is answered with {got}")
        rows.append(cells)
    await server.post("/resume")
    # Asked last, because it ends a server that believes the page.
    for page in _PAGES:
        if not page.passes and await _ask(server, page, "POST", "/shutdown", "") == 202:
            problems.append(f"{page.name}: POST /shutdown ends the server")
            break
    else:
        problems += await server.problems()
    refused = sum(cell in map(str, _REFUSED) for row in rows[1:] for cell in row)
    asked = (len(rows) - 1) * (len(rows[0]) - 1)
    return Finding(f"{asked} requests of {len(_PAGES)} pages", f"{refused} refused", problems, rows=list(rows))


async def _ask(server: Server, page: Page, method: str, path: str, body: str) -> int:
    """The status of a raw request."""
    own = "{}:{}".format(*server.address)
    head = [f"{method} {path} HTTP/1.1", f"Host: {page.host.format(own)}", "Connection: close"]
    head += [f"{name}: {value.format(own)}" for name, value in page.headers]
    # What a page may send without asking before.
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
    async with Wire(server.address) as wire:
        await wire.send(("\r\n".join(head) + "\r\n\r\n" + body).encode())
        answer = await asyncio.wait_for(wire.receive_all(), 60)
    return int(answer[9:12] or b"0")

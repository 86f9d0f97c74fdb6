"""Foreign web pages: by whose name, from where and for what a request comes, and whether it passes."""

import pytest

from server.errors import Forbidden
from server.http.pages import Hosts, Origins

ADDRESS, LAN = "127.0.0.1:30000", "192.168.1.5:30000"
POST, GET = ("POST", "/generate"), ("GET", "/server_info")


def is_allowed(checks, host, route, scheme="http", local="192.168.1.5", **headers) -> bool:
    """`local`: the address of this machine that the client has connected to."""
    method, path = route
    given = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    sent = {name.encode(): value.encode() for name, value in given.items() if value is not None}
    try:
        for check in checks:
            check.check({"scheme": scheme, "method": method, "path": path, "server": (local, 30000)}, sent)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "origin", "site", "mode", "route", "allowed"),
    [
        # curl and clients
        (ADDRESS, None, None, None, POST, True),
        (LAN, None, None, None, POST, True),
        # the server's own page, over HTTP on a network and on the own machine
        (LAN, f"http://{LAN}", None, None, POST, True),
        (ADDRESS, f"http://{ADDRESS}", "same-origin", "cors", POST, True),
        ("Box:30000", "http://box:30000", None, None, POST, True),
        (ADDRESS, None, "none", "navigate", GET, True),
        # pages of others, which say where they are from
        (LAN, "http://a.example", None, None, POST, False),
        (LAN, "http://a.example", None, None, ("POST", "/shutdown"), False),
        (LAN, "http://a.example", None, None, ("DELETE", "/cache/pins/1"), False),
        (LAN, "http://a.example", None, None, GET, False),
        (LAN, "http://a.example", None, None, ("OPTIONS", "/generate"), False),
        (LAN, "http://192.168.1.5:8080", None, None, POST, False),
        (LAN, "https://192.168.1.5:30000", None, None, POST, True),
        (LAN, "http://192.168.1.5", None, None, POST, False),
        (LAN, "null", None, None, POST, False),
        (LAN, "", None, None, POST, False),
        (ADDRESS, "http://a.example", "same-origin", None, POST, False),
        # and those of which only the browser says it
        (ADDRESS, None, "cross-site", "no-cors", GET, False),
        (ADDRESS, None, "same-site", "no-cors", GET, False),
        (ADDRESS, "null", "cross-site", "navigate", POST, False),
        (ADDRESS, None, "cross-site", "navigate", POST, False),
        (ADDRESS, None, "cross-site", "navigate", ("GET", "/dashboard"), True),
        # --cors-origins
        (LAN, "https://b.example", None, None, POST, True),
        (ADDRESS, "https://b.example", "cross-site", "cors", POST, True),
        (LAN, "http://b.example", None, None, POST, False),
    ],
)  # fmt: skip
def test_origins(host, origin, site, mode, route, allowed):
    headers = {"origin": origin, "sec_fetch_site": site, "sec_fetch_mode": mode}
    assert is_allowed([Origins(["https://b.example"])], host, route, **headers) is allowed
    assert is_allowed([Origins(["*"])], host, route, **headers)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        *((origin, True) for origin in ("app://obsidian.md", "app://.", "tauri://localhost", "capacitor://localhost")),
        *((f"{browser}-extension://ab-12", True) for browser in ("chrome", "moz", "safari-web")),
        ("vscode-webview://1abc", True),
        *(
            (origin, False)
            for origin in ("null", "file://", "http://tauri.localhost", "https://app.example", "app:", "")
        ),
        *((origin, False) for origin in ("http://app://x", "app://a b", "app://x http://a.example", "data://x")),
    ],
)
def test_apps_of_this_machine(origin, allowed):
    """No page of the web has such an origin; on a network they are as foreign as others."""
    for site in (None, "cross-site"):
        headers = {"origin": origin, "sec_fetch_site": site}
        assert is_allowed([Origins([], own_machine=True)], ADDRESS, POST, **headers) is allowed
        assert not is_allowed([Origins([])], LAN, POST, **headers)


def test_an_origin_behind_a_proxy_may_have_another_scheme():
    own = {"origin": "https://ramet.example"}
    assert is_allowed([Origins([])], "ramet.example", POST, scheme="https", **own)
    assert is_allowed([Origins([])], "ramet.example", POST, scheme="http", **own)


@pytest.mark.parametrize(
    ("host", "on_machine", "on_network"),
    [
        ("localhost:30000", True, True),
        ("LOCALHOST.", True, True),
        ("ramet.localhost:1", True, True),
        ("this-box:30000", True, True),
        ("api.example:30000", True, True),
        ("10.0.0.7", True, True),
        ("[FE80::7]:30000", True, True),
        (None, True, True),
        # names that only this network's name servers have
        ("ramet:30000", False, True),
        ("ramet.local", False, True),
        ("ramet.ns.svc.cluster.local:80", False, True),
        ("host.docker.internal:30000", False, True),
        # names that may be an attacker's
        ("a.example", False, False),
        ("a.example:30000", False, False),
        ("localhost.a.example", False, False),
        ("127.0.0.1.a.example", False, False),
        ("a.example.", False, False),
        ("a.example:30000:1", False, False),
        ("[::1", False, False),
        ("a.example@127.0.0.1:1", False, False),
        ("xlocalhost", False, True),
    ],
)
def test_hosts(monkeypatch, host, on_machine, on_network):
    monkeypatch.setattr("socket.gethostname", lambda: "this-box")
    for bound, allowed in (("127.0.0.1", on_machine), ("::1", on_machine), ("localhost", on_machine),
                           ("0.0.0.0", on_network), ("192.168.1.5", on_network)):  # fmt: skip
        check = Hosts(bound, ["API.example", "10.0.0.7", "[fe80::7]"])
        for route in (POST, GET):
            assert is_allowed([check], host, route) is allowed, bound
        assert is_allowed([check], host, ("GET", "/health")), "probes call a server as they like"
        assert is_allowed([check], host, POST, scheme="https"), "the certificate says whose name it is"
    assert is_allowed([Hosts("127.0.0.1", ["*"])], host, POST)


@pytest.mark.parametrize(
    ("bound", "local", "own", "others"),
    [
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1", "[::1]"], ["192.168.1.5", "[fe80::1]", "0.0.0.0", "8.8.8.8"]),
        ("localhost", "127.0.0.1", ["127.0.0.1", "127.0.0.2"], ["192.168.1.5"]),
        ("192.168.1.5", "192.168.1.5", ["192.168.1.5"], ["127.0.0.1", "192.168.1.6", "[::ffff:192.168.1.6]"]),
        ("0.0.0.0", "192.168.1.5", ["192.168.1.5", "127.0.0.1", "0.0.0.0"], ["192.168.1.6"]),
        ("::", "::ffff:192.168.1.5", ["192.168.1.5", "[::1]"], ["192.168.1.6", "[fe80::1]"]),
        ("::", "fe80::1%eth0", ["[fe80::1]"], ["[fe80::2]", "192.168.1.5"]),
        ("box", "192.168.1.5", ["192.168.1.5"], ["127.0.0.1", "192.168.1.6"]),
    ],
)
def test_an_address_is_the_one_that_the_client_has_connected_to(bound, local, own, others):
    for host in own + others:
        for port in ("", ":30000"):
            assert is_allowed([Hosts(bound, [])], host + port, POST, local=local) is (host in own), host
        assert is_allowed([Hosts(bound, [host])], host, POST, local=local), "--allowed-hosts names it"


def test_a_rebound_page_is_of_this_origin_and_still_foreign():
    """`http://a.example:30000` first led to the attacker, then here; the browser takes both for one site."""
    checks = [Origins([]), Hosts("192.168.1.5", [])]
    for route, origin in ((POST, "http://a.example:30000"), (("GET", "/cache/tree"), None)):
        assert not is_allowed(checks, "a.example:30000", route, origin=origin)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/shutdown", {"origin": "http://a.example"}, 403),
        ("POST", "/flush_cache", {"host": "a.example"}, 403),
        ("GET", "/cache/tree", {"host": "a.example"}, 403),
        ("GET", "/health", {"host": "a.example"}, 200),
        ("GET", "/flush_cache", {}, 405),
        ("POST", "/flush_cache", {"host": "localhost"}, 200),
    ],
)
def test_an_open_server_believes_no_page(client, method, path, headers, status):
    answer = client.request(method, path, headers=headers)
    assert answer.status_code == status
    assert status < 400 or answer.json()["error"].keys() == {"message", "type", "param", "code"}

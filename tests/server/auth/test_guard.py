"""Keys at the application's door, without an engine behind it: who is let in, and as whom."""

import asyncio
import hashlib
import stat
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter

from radix import Namespace
from runtime.config import make_config
from server.app import create_app
from server.auth.keys import CurrentTenant, EveryKey, Guard, Tenant, read_keys
from server.errors import BadKeys, Forbidden, Unauthorized

KEYS = (
    "alice alice-key max_priority=3\nboss boss-key admin\nscraper scraper-key metrics\nlast last-key public quota=7\n"
)


def make_app(keys: str, tmp_path, **options):
    (tmp_path / "keys").write_text(keys)
    engine = SimpleNamespace(info=SimpleNamespace(name="x"))
    app = create_app(engine, make_config(**options), read_keys(tmp_path / "keys") if keys else [])

    @app.get("/who")
    def who(tenant: CurrentTenant) -> dict:
        return {"name": tenant.name, "admin": tenant.admin, "public": tenant.public}

    return app


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    app = make_app(KEYS, tmp_path_factory.mktemp("guard"))

    def ask(path: str, *headers: tuple[str, str], method: str = "GET") -> tuple[int, dict]:
        return send(app, path, headers, method)

    return ask


def send(app, path: str, headers=(), method: str = "GET") -> tuple[int, dict]:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=list(headers))

    answer = asyncio.run(once())
    return answer.status_code, answer.json() if "json" in answer.headers.get("content-type", "") else {}


def bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


@pytest.mark.parametrize("name", ["alice", "boss", "last"])
def test_each_key_is_its_own_tenant(ask, name):
    status, body = ask("/who", bearer(f"{name}-key"))
    assert (status, body) == (200, {"name": name, "admin": name == "boss", "public": name == "last"})


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer alice-key")],
        [("authorization", "bearer alice-key")],
        [("Authorization", "BEARER   alice-key ")],
        [("X-API-Key", "alice-key")],
        [("X-API-Key", " alice-key ")],
        [("Authorization", "Basic Ym9zczpib3Nz"), ("X-API-Key", "alice-key")],
        [("Authorization", "Bearer alice-key"), ("X-API-Key", "boss-key")],
        [("Authorization", "Bearer alice-key"), ("X-API-Key", "no such key")],
    ],
)
def test_ways_to_show_a_key(ask, headers):
    assert ask("/who", *headers)[1].get("name") == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer ")],
        [("Authorization", "Bearer")],
        [("Authorization", "alice-key")],
        [("Authorization", "Basic alice-key")],
        [("Authorization", "Bearer alice-ke")],
        [("Authorization", "Bearer alice-key2")],
        [("Authorization", "Bearer alice-keys alice-key")],
        [("Authorization", "Bearer ALICE-KEY")],
        [("Authorization", "Bearer alice")],
        [("Authorization", "Bearer wrong-key"), ("X-API-Key", "alice-key")],
        [("X-API-Key", "")],
        [("Api-Key", "alice-key")],
    ],
)
def test_no_key_and_wrong_ones(ask, headers):
    for path in ("/who", "/no/such/route", "/metrics", "/cache/pins"):
        status, body = ask(path, *headers)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert ask("/health", *headers)[0] != 401


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key"])
@pytest.mark.parametrize("second", ["Bearer alice-key", "Bearer boss-key", ""])
def test_a_header_with_a_key_is_sent_once(ask, name, second):
    status, body = ask("/who", bearer("alice-key"), (name, "alice-key"), (name, second))
    assert (status, name.lower() in body["error"]["message"]) == (400, True)


def test_a_scraper_s_key_is_for_metrics_alone(ask):
    assert ask("/metrics", bearer("scraper-key"))[0] not in (401, 403)
    for path in ("/who", "/metrics/", "/metricsx"):
        assert ask(path, bearer("scraper-key"))[0] == 403, path
    scraper = Tenant("s", hashlib.sha256(b"scraper-key").digest(), metrics=True)
    scope = {"path": "/metrics", "headers": [(b"x-api-key", b"scraper-key")], "state": {}}
    Guard([scraper], []).check(scope, {})
    assert scope["state"]["tenant"] is scraper, "and no admin"


def test_a_key_is_compared_to_its_last_bit():
    digest = hashlib.sha256(b"some-key").digest()
    scope = {"path": "/who", "headers": [(b"x-api-key", b"some-key")], "state": {}}
    for at in (0, 4, 31):
        other = bytearray(digest)
        other[at] ^= 1
        with pytest.raises(Unauthorized):
            Guard([Tenant("x", bytes(other))], []).check(scope, {})
    Guard([Tenant("x", digest)], []).check(scope, {})


def test_without_keys_everybody_may_do_everything(tmp_path):
    app = make_app("", tmp_path)
    assert send(app, "/who") == (200, {"name": "", "admin": True, "public": True})
    assert send(app, "/who", [("X-API-Key", "any"), ("X-API-Key", "two")])[0] == 200
    assert send(app, "/cache/stats")[0] not in (401, 403)


@pytest.mark.parametrize(
    ("options", "opens"),
    [
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "192.168.1.5"}, False),
        ({"host": "box"}, False),
        ({"host": "0.0.0.0", "open_admin": True}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
    ],
)
def test_without_keys_others_are_admins_where_the_operator_says_so(tmp_path, options, opens):
    app = make_app("", tmp_path, allowed_hosts="127.0.0.1", **options)
    for method, path in (
        ("GET", "/cache/stats"),
        ("POST", "/shutdown"),
        ("GET", "/metrics"),
        ("DELETE", "/cache/tenants/a"),
    ):
        status, body = send(app, path, method=method)
        assert (status == 403) is not opens, path
        assert opens or "--open-admin" in body["error"]["message"]
    assert send(app, "/who") == (200, {"name": "", "admin": opens, "public": True})


def test_a_route_is_closed_unless_its_router_says_otherwise():
    plain, own = APIRouter(), EveryKey()
    for router, method, path in (
        (plain, "POST", "/things/{name}"),
        (plain, "GET", "/new"),
        (plain, "GET", "/health"),
        (plain, "DELETE", "/x"),
        (own, "GET", "/things/{name}"),
        (own, "GET", "/x"),
        (own, "GET", "/mine"),
    ):
        router.add_api_route(path, lambda: None, methods=[method])
    alice = Tenant("alice", digest("alice-key"))
    guard = Guard([alice], [plain, own])

    def is_let_in(method: str, path: str) -> bool:
        scope = {"path": path, "method": method, "headers": [(b"x-api-key", b"alice-key")], "state": {}}
        try:
            guard.check(scope, {})
        except Forbidden:
            return False
        return True

    for method, path in (
        ("GET", "/things/1"),
        ("HEAD", "/things/1"),
        ("GET", "/x"),
        ("GET", "/mine"),
        ("PUT", "/mine"),
    ):
        assert is_let_in(method, path), path
    for method, path in (
        ("POST", "/things/1"),
        ("PUT", "/things/1"),
        ("GET", "/new"),
        ("HEAD", "/new"),
        ("DELETE", "/x"),
    ):
        assert not is_let_in(method, path), path
    assert is_let_in("GET", "/health")
    assert is_let_in("GET", "/no/such/route"), "which is answered with 404"


# -- lines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def read(tmp_path, monkeypatch):
    def read(text: str, environment: str = "") -> list[Tenant]:
        monkeypatch.setenv("RAMET_API_KEYS", environment)
        (tmp_path / "keys").write_text(text)
        return read_keys(tmp_path / "keys")

    return read


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def test_every_field_of_a_line(read):
    plain, full, scraper = read(
        "a 12345678\nb.c-d_e  ключ5678\tquota=999999999 public admin max_priority=9\nm 87654321 metrics"
    )
    assert plain == Tenant("a", digest("12345678"), account=plain.account)
    assert full == Tenant("b.c-d_e", digest("ключ5678"), True, True, 999_999_999, 9, False, full.account)
    assert scraper == Tenant("m", digest("87654321"), metrics=True, account=scraper.account)
    assert (plain.quota, plain.max_priority, plain.admin, plain.public, plain.metrics) == (None, 0, False, False, False)


def test_bounds_of_a_line(read):
    for good in ("n" * 64 + " " + "k" * 8, "n " + "k" * 512, "n 12345678 quota=1", "n 12345678 max_priority=0"):
        assert len(read(good)) == 1
    for bad in (
        "n" * 65 + " " + "k" * 8,
        "n " + "k" * 7,
        "n " + "k" * 513,
        "n",
        "n 12345678 quota=1000000000",
        "n 12345678 quota=01",
        "n 12345678 quota=",
        "n 12345678 max_priority=1234567890",
        "a/b 12345678",
        "n 12345678 metrics quota=1",
        "n 12345678 admin metrics",
        "n 12345678 metrics public",
        "n 12345678 Admin",
        "n 12345678 quota",
        "n 12345678 quota=0",
        "n 12345678 max_priority=-1",
        "n 12345678 king",
    ):
        with pytest.raises(BadKeys, match=r"line 3 of .*keys is neither .* 8 to 512 characters"):
            read(f"# of others\n\n{bad}", "x 12345678; y 87654321")


def test_one_key_has_one_name_and_one_name_one_key(read):
    for text, environment, line in (
        ("a same-key-1\nb same-key-1", "", "2 of .*keys"),
        ("a first-key\na second-key", "", "2 of .*keys"),
        ("b same-key-1", "a same-key-1", "1 of .*keys"),
        ("a second-key", "b 12345678;a first-key", "1 of .*keys"),
        ("", "b 12345678;b first-key", "2 of RAMET_API_KEYS"),
    ):
        with pytest.raises(BadKeys, match=f"line {line} repeats a name or a key") as found:
            read(text, environment)
        assert "-key" not in found.value.message
    several = [(one.name, one.quota) for one in read("b second-key", "a first-key quota=64; ;c third-key")]
    assert several == [("a", 64), ("c", None), ("b", None)]


def test_without_a_file_there_is_the_environment_alone(monkeypatch):
    monkeypatch.setenv("RAMET_API_KEYS", "a 12345678")
    assert [one.name for one in read_keys(None)] == ["a"]
    monkeypatch.delenv("RAMET_API_KEYS")
    assert read_keys(None) == []


def test_comments_and_blank_lines(read):
    read_names = [one.name for one in read("# a 12345678\n\n  b 12345678   # c\n\td 1234#5678 admin #x\n")]
    assert read_names == ["b", "d"]
    assert read("d 1234#5678 admin #x")[0].admin


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.delenv("RAMET_API_KEYS", raising=False)
    path = tmp_path / "keys"
    path.write_bytes(b"a 1234567\xff")
    with pytest.raises(BadKeys, match=r"--api-keys .*keys cannot be read: not UTF-8"):
        read_keys(path)
    with pytest.raises(BadKeys, match="cannot be read: No such file"):
        read_keys(tmp_path / "other")
    path.write_text("# nothing\n")
    with pytest.raises(BadKeys, match="has no key"):
        read_keys(path)


# -- tenants -----------------------------------------------------------------------------------------------------


def test_the_namespaces_of_a_tenant():
    tenant, marked = Tenant("a", b"", account="1"), Tenant("b", b"", public=True, account="2")
    assert tenant.namespace(None, "private") == Namespace(tenant.account)
    assert tenant.namespace("s", "private") == Namespace(tenant.account, "s")
    assert marked.namespace("s", "public") == Namespace("public", "s")
    assert marked.namespace(None, "public") == Namespace("public")
    assert marked.namespace("s", "private") == Namespace(marked.account, "s")
    for unmarked in (tenant, Tenant("c", b"", admin=True)):
        with pytest.raises(Forbidden, match="may not use public prefixes") as error:
            unmarked.namespace("s", "public")
        assert (error.value.param, error.value.status) == ("cache_scope", 403)


@pytest.fixture
def ids(tmp_path, monkeypatch):
    """Ids of tenants by names, for keys that are read with a cache directory."""

    def ids(text: str, cache: str = "cache") -> dict[str, str]:
        monkeypatch.setenv("RAMET_CACHE", str(tmp_path / cache))
        monkeypatch.setenv("RAMET_API_KEYS", text)
        return {tenant.name: tenant.account for tenant in read_keys(None)}

    return ids


def test_nobody_without_the_secret_of_the_installation_knows_an_id(ids, tmp_path):
    first = ids("a password; b 87654321")
    secret = tmp_path / "cache" / "tenants.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert [path.name for path in secret.parent.iterdir()] == ["tenants.secret"]
    assert ids("b 87654321; c 12345678; a password")["a"] == first["a"], "also beside other keys, after a restart"
    elsewhere = ids("a password; b 87654321", "other")
    assert len({*first.values(), *elsewhere.values(), digest("password").hex()[:32]}) == 5
    secret.write_text("short")
    with pytest.raises(BadKeys, match=r"tenants\.secret has 5 bytes; the secret of tenants has 32 or more"):
        ids("a password")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadKeys, match=r"cannot be kept in .*/file/tenants.secret: .*RAMET_CACHE, or add a line"):
        ids("a password", "file")


def test_servers_share_a_secret_by_a_line_of_their_keys(ids, tmp_path):
    line = f"* {'s' * 32}"
    assert ids(f"{line}; a password") == ids(f"a password;{line}", "other") != ids(f"{line}s; a password")
    assert not list(tmp_path.iterdir()), "no secret is made"
    assert ids(line) == {}, "which is no key"
    with pytest.raises(BadKeys, match="line 1 of RAMET_API_KEYS is neither"):
        ids(f"* {'s' * 31};a password")


def test_two_servers_that_start_at_once_have_one_secret(ids, tmp_path, monkeypatch):
    def link(new, path):
        path.write_text("x" * 32)
        raise FileExistsError

    monkeypatch.setattr("os.link", link)
    assert ids("a password") == ids("a password")
    assert (tmp_path / "cache" / "tenants.secret").read_text() == "x" * 32

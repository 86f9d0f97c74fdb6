"""Discovery of routes, without a server."""

from importlib import import_module

from server.app import find_routers

ROUTES = """
from fastapi import APIRouter

router = APIRouter(prefix="/greet")


@router.get("/all")
@router.get("/{name}/loudly")
async def greet() -> str:
    return "hello"
"""


def test_a_route_is_one_file(tmp_path, monkeypatch):
    package = tmp_path / "package_of_routes"
    package.mkdir()
    for name, text in (("__init__", ""), ("greet", ROUTES), ("helpers", "ANSWER = 42")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    routers = find_routers(import_module(package.name))
    assert [route.path for router in routers for route in router.routes] == ["/greet/{name}/loudly", "/greet/all"]

"""The key file while the server runs: changes count, errors do not."""

import asyncio
import os

from server.auth.keys import read_keys
from server.auth.watch import watch_keys


def names_after(path, tenants, text) -> list[str]:
    """Names of the keys after the file was replaced, as a mounted secret is; waits until it was read."""

    async def change() -> None:
        watching = asyncio.create_task(watch_keys(path, tenants, every_s=0.01))
        await asyncio.sleep(0.1)
        path.with_name("new").write_text(text)
        os.replace(path.with_name("new"), path)
        await asyncio.sleep(0.3)
        assert not watching.done()
        watching.cancel()

    asyncio.run(change())
    return [tenant.name for tenant in tenants]


def test_keys_are_added_and_removed_while_the_server_runs(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("alice alice-key\nbob bobs-own-key\n")
    tenants = read_keys(path)
    accounts = {tenant.name: tenant.account for tenant in tenants}
    assert names_after(path, tenants, "alice alice-key\ncarol carols-key admin\n") == ["alice", "carol"]
    assert tenants[0].account == accounts["alice"], "what alice has cached stays hers"
    assert tenants[1].admin
    assert names_after(path, tenants, "alice\n") == ["alice", "carol"]
    assert "the keys stay as they were: line 1" in caplog.text
    assert names_after(path, tenants, "") == ["alice", "carol"], "a server never becomes open"


def test_a_scope_of_the_key_is_that_of_requests_without_one(tmp_path):
    (tmp_path / "keys").write_text("team team-key scope=public\nother other-key public\n")
    team, other = read_keys(tmp_path / "keys")
    assert team.namespace(None, None) == team.namespace("", "public") == other.namespace(None, "public")
    assert other.namespace(None, None) != team.namespace(None, None)
    assert team.namespace(None, "private").tenant == team.account

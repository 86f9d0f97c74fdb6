"""The key file while the server runs: changes count, errors do not."""

import asyncio
import os

from server.auth.keys import read_keys
from server.auth.watch import watch_keys


def replace(path, text) -> None:
    """As a mounted secret is."""
    path.with_name("new").write_text(text)
    os.replace(path.with_name("new"), path)


def watch(path, tenants, *changes) -> None:
    """Each change of the file gives keys of these names; None: the keys stay."""

    async def change() -> None:
        watching = asyncio.create_task(watch_keys(path, "fixed fixed-key", tenants, every_s=0.01))
        await asyncio.sleep(0.1)
        for work, text, wanted in changes:
            before = [tenant.name for tenant in tenants]
            work(path, text)
            for _ in range(200 if wanted else 5):
                await asyncio.sleep(0.02)
                if [tenant.name for tenant in tenants] == wanted:
                    break
            assert [tenant.name for tenant in tenants] == (wanted or before)
        assert not watching.done()
        watching.cancel()

    asyncio.run(change())


def test_keys_are_added_and_removed_while_the_server_runs(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("alice alice-key\nbob bobs-own-key\n")
    tenants = read_keys(path, "fixed fixed-key")
    accounts = {tenant.name: tenant.account for tenant in tenants}
    more = (replace, "alice alice-key\ncarol carols-key admin\n", ["fixed", "alice", "carol"])
    watch(path, tenants, more, (replace, "alice\n", None))
    assert "the keys stay as they were: line 1" in caplog.text
    assert tenants[1].account == accounts["alice"], "what alice has cached stays hers"
    assert tenants[2].admin
    watch(path, tenants, (replace, "", ["fixed"]), more)  # keys of the environment stay


def test_every_way_in_which_a_file_changes_is_seen(tmp_path):
    """Also where it keeps its size, its name or its times."""
    path, other = tmp_path / "keys", tmp_path / "other"
    path.write_text("alice first-key\n")
    tenants = read_keys(path, "")

    def written(path, text) -> None:
        path.write_text(text)

    def with_the_same_time(path, text) -> None:
        times = os.stat(path)
        replace(path, text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def linked(path, text) -> None:
        other.write_text(text)
        path.unlink()
        path.symlink_to(other)

    def behind_the_link(path, text) -> None:
        replace(other, text)

    ways = [written, replace, with_the_same_time, linked, behind_the_link, written]
    watch(path, tenants, *((way, f"name{i} other-key\n", ["fixed", f"name{i}"]) for i, way in enumerate(ways)))


def test_a_scope_of_the_key_is_that_of_requests_without_one(tmp_path):
    (tmp_path / "keys").write_text("team team-key scope=public\nother other-key public\n")
    team, other = read_keys(tmp_path / "keys")
    assert team.namespace(None, None) == team.namespace("", "public") == other.namespace(None, "public")
    assert other.namespace(None, None) != team.namespace(None, None)
    assert team.namespace(None, "private").tenant == team.account

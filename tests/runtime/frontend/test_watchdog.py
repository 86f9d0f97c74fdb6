"""The watchdog, on an engine that answers when the test says so."""

import asyncio
from collections.abc import Awaitable, Callable

from runtime.errors import EngineDead
from runtime.frontend.watchdog import Watchdog

BOUND_S = 0.2


class Engine:
    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.asked = self.killed = 0
        self.watchdog, self.ticks = Watchdog(BOUND_S), 0
        judge = self.watchdog._judge
        self.watchdog._judge = lambda ticks, kill: setattr(self, "ticks", ticks) or judge(ticks, kill)

    async def ask(self) -> None:
        self.asked += 1
        await self.goes_on.wait()
        if self.killed:
            raise EngineDead("killed")

    def kill(self) -> None:
        self.killed += 1
        self.goes_on.set()


def watch(life: Callable[[Engine], Awaitable[None]]) -> Engine:
    """Live with a watched engine; returns it."""

    async def run() -> Engine:
        engine = Engine()
        watching = asyncio.create_task(engine.watchdog.watch(engine.ask, engine.kill))
        await life(engine)
        if engine.killed:
            await asyncio.wait_for(watching, 60)
        watching.cancel()
        return engine

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_step_that_hangs_is_told_and_then_ended():
    async def life(engine: Engine) -> None:
        await until(lambda: engine.asked > 2)
        assert not engine.watchdog.late
        engine.goes_on.clear()
        await until(lambda: engine.watchdog.late)
        assert not engine.killed
        await until(lambda: bool(engine.killed))

    assert watch(life).killed == 1


def test_an_engine_that_goes_on_is_left_alone():
    async def life(engine: Engine) -> None:
        engine.goes_on.clear()
        await until(lambda: engine.watchdog.late)
        engine.goes_on.set()
        await until(lambda: not engine.watchdog.late)

    assert watch(life).killed == 0


def test_a_suspended_machine_lets_no_time_pass():
    """Neither process runs meanwhile, and the clock goes on, far beyond the bound."""

    async def life(engine: Engine) -> None:
        engine.goes_on.clear()
        await until(lambda: engine.asked > 0)
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + 3 * BOUND_S  # type: ignore[method-assign]
        await until(lambda: engine.ticks > 1)
        assert not engine.watchdog.late
        engine.goes_on.set()

    assert watch(life).killed == 0


def test_no_bound_no_questions():
    async def life() -> int:
        engine = Engine()
        await asyncio.wait_for(Watchdog(0).watch(engine.ask, engine.kill), 60)
        return engine.asked

    assert asyncio.run(life()) == 0

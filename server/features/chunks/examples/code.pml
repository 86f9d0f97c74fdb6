<schema name="game-code">
<system>You are a careful programmer. You read the source files of a project and write code that fits them.</system>
<user>These are files of a small game in Python.
<module name="unit.py">
# unit.py
class Unit:
    """A figure on the map, with health and a place."""

    def __init__(self, name: str, health: int = 10, strength: int = 2):
        self.name = name
        self.health = health
        self.strength = strength
        self.place = (0, 0)

    @property
    def alive(self) -> bool:
        return self.health &gt; 0

    def move(self, dx: int, dy: int) -> None:
        x, y = self.place
        self.place = (x + dx, y + dy)

    def attack(self, other: "Unit") -> None:
        other.health -= self.strength
</module>
<module name="map.py">
# map.py
class Map:
    """A rectangle of fields, some of which are walls."""

    def __init__(self, width: int, height: int):
        self.width = width
        self.height = height
        self.walls: set[tuple[int, int]] = set()

    def is_free(self, place: tuple[int, int]) -> bool:
        x, y = place
        return 0 &lt;= x &lt; self.width and 0 &lt;= y &lt; self.height and place not in self.walls

    def add_wall(self, x: int, y: int) -> None:
        self.walls.add((x, y))
</module>
<module name="player.py">
# player.py
from unit import Unit


class Player:
    """One who plays: a name, units and points."""

    def __init__(self, name: str):
        self.name = name
        self.units: list[Unit] = []
        self.points = 0

    def recruit(self, unit: Unit) -> None:
        self.units.append(unit)

    def has_lost(self) -> bool:
        return not any(unit.alive for unit in self.units)
</module>
<module name="game.py">
# game.py
from map import Map
from player import Player


class Game:
    """Players who take turns on a map until one is left."""

    def __init__(self, players: list[Player], board: Map):
        self.players = players
        self.board = board
        self.turn = 0

    @property
    def current(self) -> Player:
        return self.players[self.turn % len(self.players)]

    def end_turn(self) -> None:
        self.turn += 1

    def winner(self) -> Player | None:
        left = [player for player in self.players if not player.has_lost()]
        return left[0] if len(left) == 1 else None
</module>
<module name="database.py">
# database.py
import json
from pathlib import Path


class Database:
    """Points of players by their names, in a file."""

    def __init__(self, path: Path):
        self.path = path

    def load(self) -> dict[str, int]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def save(self, points: dict[str, int]) -> None:
        self.path.write_text(json.dumps(points))
</module>
</user>
<assistant>I have read the files. Tell me what to write.</assistant>
</schema>

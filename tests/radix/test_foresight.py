"""Eviction by foresight: against a plain model of it, step by step, and by hand where it matters why."""

import random
from array import array

import numpy as np
import pytest

from radix import Namespace, Policy, Quotas, RadixTree, foresight, returns
from radix.foresight import Foresight
from radix.node import Node
from radix.returns import BUCKETS, EDGES, KINDS, Life, Returns, bucket, describe, kind_of
from tests.radix import foresight_model as plain
from tests.radix.trees import Tree, key

# -- the index ---------------------------------------------------------------------------------------------------


def test_buckets_are_two_an_octave():
    assert [bucket(age) for age in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12)] == [0, 1, 3, 4, 5, 5, 6, 6, 7, 7, 8]
    assert [bucket(age) for age in (65535, 65536, 1 << 40)] == [32, 33, 33]
    assert list(EDGES[1:]) == plain.BEHIND
    assert EDGES[0] == 0
    for age in range(5000):
        assert bucket(age) == plain.bucket(age) == sum(edge <= age for edge in EDGES[1:])


def test_kinds():
    assert [kind_of(turn, 0.0, False) for turn in (1, 2, 3, 4, 5, 10)] == [13, 14, 15, 15, 16, 16]
    assert [kind_of(5, gap, False) for gap in (3.9, 4.0, 1023.9, 4095.9, 4096.0, 1e6)] == [16, 19, 40, 43, 46, 49]
    assert [kind_of(3, gap, True) for gap in (3.9, 4.0, 15.0, 511.0, 512.0, 16384.0)] == [1, 2, 3, 8, 9, 12]
    assert KINDS == 50


def test_the_mean_gap_follows_the_last_ten():
    life = Life(0, 100, 13, 1, 0.0)
    assert life.next_turn(130) == (2, 30.0)
    assert Life(0, 130, 29, 2, 30.0).next_turn(140) == (3, 20.0)
    assert Life(0, 0, 16, 10, 20.0).next_turn(120) == (10, 30.0)


def test_kinds_in_words():
    assert [describe(kind) for kind in (1, 12, 13)] == [
        "shared prefix, mean gap below 4 uses", "shared prefix, mean gap of 16384 uses or more", "first turn"
    ]  # fmt: skip
    assert [describe(kind) for kind in (14, 18, 49)] == [
        "turn 2, mean gap below 4 uses", "turn 3 or 4, mean gap below 8 uses",
        "turn 5 or later, mean gap of 16384 uses or more",
    ]  # fmt: skip
    assert len({describe(kind) for kind in range(1, KINDS)}) == KINDS - 1


def test_what_returns_after_a_while_promises_more_the_nearer_that_is():
    """Nothing returns at once, and all does after 100 uses: a page that has waited for 95 is worth five new ones."""
    learned = Returns()
    waiting: list[Life] = []
    for tick in range(1, 4000):
        waiting.append(learned.begin(tick, 1, 0))
        if tick > 100:
            learned.end(waiting[tick - 101], tick)
    learned.learn(4000)
    promise = learned.promises()[13]
    chance = 1 / 100
    assert promise[1] == pytest.approx(chance, rel=0.3)
    assert list(promise[: bucket(100)]) == sorted(promise[: bucket(100)])
    assert promise[bucket(100)] == pytest.approx(0.98 / (37 * (1 - 0.98 / 2)), rel=0.01)
    assert promise[bucket(200)] < promise[1]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_learned_equals_a_plain_count(seed, monkeypatch):
    monkeypatch.setattr(returns, "_MEMORY", 300)
    draw, learned, model = random.Random(seed), Returns(), plain.Statistics()
    pairs: list[tuple[Life, plain.Wait]] = []
    tick = forgotten = 0
    for step in range(1, 2000):
        tick += draw.choice((0, 1, 1, 1, 2, 40))
        if step - 1 - forgotten == 600:
            forgotten += 300
            for _, wait in pairs[:forgotten]:
                wait.seen = BUCKETS
        turn, gap, shared = draw.randint(1, 10), draw.uniform(1, 20000), draw.random() < 0.2
        pairs.append((learned.begin(tick, turn, gap, shared), model.begin(tick, turn, gap, shared)))
        life, wait = pairs[max(int(step - draw.paretovariate(0.5)), 0)]
        assert (life.kind, life.is_over) == (wait.kind, wait.over)
        assert life.next_turn(tick) == pytest.approx(wait.next(tick))
        if not wait.over:
            if wait.lost or draw.random() < 0.2:
                learned.cancel(life)
                wait.lost = True
            else:
                learned.end(life, tick)
                wait.end = plain.bucket(tick - wait.since)
        if step % 64 == 0:
            learned.learn(tick)
            model.learn(tick)
        if step % 500 == 0:
            learned.halve()
            model.halve()
        if step % 200 == 0:
            assert learned.promises() == pytest.approx(np.array(model.promises()), rel=1e-9)


# -- the policy --------------------------------------------------------------------------------------------------


class Both(Policy):
    """Tells foresight and its model the same, and compares what they say."""

    def __init__(self, capacity: int, more_ghosts: int, learn_after: tuple[int, int], halve_every: int):
        self.real, self.victims = Foresight(capacity), 0
        self.model = plain.PlainForesight(capacity + more_ghosts, learn_after, halve_every)

    def used(self, node: Node, tick: int) -> None:
        self.model.used(node, tick)
        self.real.used(node, tick)

    def enter(self, node: Node) -> None:
        self.model.enter(node)
        self.real.enter(node)

    def split(self, upper: Node, lower: Node) -> None:
        self.model.split(upper, lower)
        self.real.split(upper, lower)

    def leaving(self, node: Node, kept_pages: int) -> None:
        self.model.leaving(node, kept_pages)
        self.real.leaving(node, kept_pages)

    def absorb(self, parent: Node, child: Node) -> None:
        self.model.absorb(parent, child)
        self.real.absorb(parent, child)

    def pop(self):
        least, found = self.model.least(lambda node: node.is_free_leaf)
        victim = self.real.pop()
        assert (victim is None) == (not found)
        if victim is not None:
            node, pages = victim
            assert found[node][0] == pytest.approx(least, rel=1e-9), "another promises less"
            assert pages == found[node][1]
            seen = self.real.outlook(node)
            assert seen.promise == pytest.approx(self.model.promise(node), rel=1e-9)
            assert (seen.age, seen.kind) == (self.model.now - node.last_use, describe(self.model.notes[node].wait.kind))
            self.victims += 1
        return victim


class Traffic:
    """Chats over some system prompts, on a tree of few pages, with requests that stay for a while."""

    def __init__(self, seed: int, policy: Policy, capacity: int = 60, page_size: int = 1):
        self.draw, self.page_size, self.time = random.Random(seed), page_size, 0.0
        self.free, self.capacity = list(range(capacity)), capacity
        quotas = Quotas({"b": capacity // 3})
        self.tree = RadixTree(page_size, policy, lambda: self.time, quotas)
        self.systems = [self.some(2, 5) for _ in range(3)]
        self.chats: list[tuple[Namespace, list[int]]] = []
        self.live: list[Node] = []
        self.hits = 0

    def some(self, least: int, most: int) -> list[int]:
        """Whole pages; their first tokens are few, so that prompts share more than they mean to."""
        draw = self.draw
        return [draw.randrange(8) for _ in range(draw.randint(least, most) * self.page_size)]

    def prompt(self) -> tuple[Namespace, list[int]]:
        draw = self.draw
        if self.chats and draw.random() < 0.7:
            where = max(len(self.chats) - int(draw.paretovariate(0.6)), 0)
            space, tokens = self.chats.pop(where)
            tokens = tokens[: len(tokens) - draw.choice((0, 0, 0, 1, 2)) * self.page_size] + self.some(0, 3)
        else:
            space = Namespace(draw.choice("ab"))
            tokens = draw.choice(self.systems)[:] + self.some(1, 4)
        tokens = tokens[: 16 * self.page_size]
        self.chats = [*self.chats[-30:], (space, tokens)]
        return space, tokens

    def step(self) -> None:
        tree, draw = self.tree, self.draw
        space, tokens = self.prompt()
        match = tree.match(key(*tokens), space)
        node = tree.lock_match(match)
        tree.use(node)
        self.hits += len(match.pages)
        need = len(tokens) // self.page_size - len(match.pages)
        self.free.extend(tree.make_room(space, need))
        if need > len(self.free):
            self.free.extend(tree.evict(need - len(self.free)))
        fresh = [self.free.pop() for _ in range(min(need, len(self.free)))]
        whole = match.pages + array("i", fresh)
        at = len(match.pages)
        for end in sorted({draw.randint(at, len(whole)), len(whole)}):
            if end:
                tree.insert(key(*tokens[: end * self.page_size]), whole[:end], space)
        tip = tree.match(key(*tokens), space).node
        tree.lock(tip)
        tree.unlock(node)
        self.live.append(tip)
        while len(self.live) > draw.randrange(3):
            one = self.live.pop(draw.randrange(len(self.live)))
            tree.touch(one)
            tree.unlock(one)
        chance = draw.random()
        if chance < 0.004:
            self.free.extend(tree.flush())
        elif chance < 0.01 and tree.num_nodes:
            nodes = list(tree.nodes())
            self.free.extend(tree.drop(nodes[draw.randrange(len(nodes))]))


def test_foresight_equals_its_plain_model(monkeypatch):
    """It learns from fewer uses than usual here, so that all of it happens within a second."""
    for name, value in (("_MORE_GHOSTS", 5), ("_LEARN_LEAST", 30), ("_HALVE_EVERY", 200)):
        monkeypatch.setattr(foresight, name, value)
    for seed, (page_size, capacity) in enumerate(((1, 60), (2, 40), (1, 25), (1, 60))):
        both = Both(capacity, 5, (30, 1024), 200)
        traffic = Traffic(seed, both, capacity, page_size)
        for _ in range(300):
            traffic.step()
        traffic.tree.check()
        assert both.victims > 100
        assert traffic.hits > 0
        assert both.model.share != 1.0
        assert both.real._promises[: KINDS * BUCKETS] == pytest.approx(np.array(both.model.table).ravel(), rel=1e-9)
        assert len(both.real._ghosts) == len(both.model.ghosts) <= capacity + 5
        places = {node: node.record.place for node in traffic.tree.nodes()}
        assert all(both.real._leaves._nodes[at] is node for node, at in places.items() if at >= 0)
        assert len(both.real._leaves._nodes) == sum(at >= 0 for at in places.values())


def test_foresight_equals_its_plain_model_over_a_long_time(monkeypatch):
    monkeypatch.setattr(foresight, "_LEARN_MOST", 50)
    both = Both(30, 4096, (32, 50), 4096)
    traffic = Traffic(9, both, 30)
    for _ in range(2200):
        traffic.step()
    assert both.model.uses > 4096


# -- by hand -----------------------------------------------------------------------------------------------------


def test_more_leaves_than_a_sample_are_compared_at_an_even_stride():
    """Each victim is the least of its sample, and samples take turns: nobody is left out."""
    policy = Foresight(10_000)
    tree = Tree(policy=policy)
    nodes = [tree.add(i) for i in range(64 * 5 + 5)]
    oldest = []
    for _ in range(5):
        (page,) = tree.evict(1)
        oldest.append(page)
    # The sample of turn n begins with the n-th leaf; in the places of those that went stand the last ones.
    assert oldest == [1, 2, 3, 4, 0]
    assert len(tree.evict(10**6)) == len(nodes) - 5
    assert tree.num_pages == 0


@pytest.mark.parametrize(
    ("ages", "promises", "first"),
    [
        ((10**6, 10**6), {0: 0.9, 32: 0.9, 33: 0.5, 34: 0.9, 66: 0.1, 67: 0.6, 68: 0.1}, 0),
        ((10**6, 0), {33: 1.0, 34: 0.6}, 0),
        ((10**6, 0), {33: 1.0, 34: 0.4}, 1),
    ],
)
def test_the_oldest_are_in_the_last_bucket_and_go_a_little_earlier(ages, promises, first):
    tree = Tree(policy=Foresight(9))
    nodes = [tree.add(i) for i in range(2)]
    table = [promises.get(i, 0.0) for i in range(3 * BUCKETS)]
    leaves = foresight._Leaves()
    for i, node in enumerate(nodes):
        node.record.place, node.last_use = -1, 10**6 - ages[i]
        leaves.put(node, i * BUCKETS)
    assert leaves.least(np.array(table), 10**6) is nodes[first]

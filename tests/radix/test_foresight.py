"""Eviction by foresight: its statistics against plain counts and sums, its order by hand, and under mixed traffic."""

import random
from array import array

import numpy as np
import pytest

from radix import Namespace, Policy, Quotas, RadixTree, foresight, returns
from radix.foresight import Foresight
from radix.node import Node
from radix.returns import BUCKETS, EDGES, KINDS, Life, Returns, bucket, describe, kind_of
from tests.radix.trees import Tree, key

# -- the index ---------------------------------------------------------------------------------------------------


def test_buckets_are_two_an_octave():
    assert [bucket(age) for age in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12)] == [0, 1, 3, 4, 5, 5, 6, 6, 7, 7, 8]
    assert [bucket(age) for age in (65535, 65536, 1 << 40)] == [32, 33, 33]
    assert all(bucket(age) == sum(edge <= age for edge in EDGES[1:]) for age in range(5000))


def test_the_mean_gap_follows_the_last_ten():
    life = Life(0, 100, 13, 1, 0.0)
    assert life.next_turn(130) == (2, 30.0)
    assert Life(0, 130, 29, 2, 30.0).next_turn(140) == (3, 20.0)
    assert Life(0, 0, 16, 10, 20.0).next_turn(120) == (10, 30.0)


@pytest.mark.parametrize(
    ("turn", "gap", "shared", "words"),
    [
        (1, 0.0, False, "first turn"),
        (2, 3.9, False, "turn 2, mean gap below 4 uses"),
        (3, 4.0, False, "turn 3 or 4, mean gap below 8 uses"),
        (4, 4095.9, False, "turn 3 or 4, mean gap below 4096 uses"),
        (10, 1e6, False, "turn 5 or later, mean gap of 16384 uses or more"),
        (3, 3.9, True, "shared prefix, mean gap below 4 uses"),
        (3, 16384.0, True, "shared prefix, mean gap of 16384 uses or more"),
    ],
)
def test_kinds_in_words(turn, gap, shared, words):
    assert describe(kind_of(turn, gap, shared)) == words
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


def test_counts_of_lives_that_entered_a_bucket_and_returned_in_it(monkeypatch):
    """Also where the memory of Lives is full, so that the oldest are no longer observed."""
    monkeypatch.setattr(returns, "_MEMORY", 300)
    draw, learned, lives = random.Random(0), Returns(), list[Life]()
    entered, ended = np.zeros((2, KINDS, BUCKETS))
    ends: dict[Life, int] = {}  # the bucket of a return; -1: nobody observes any more
    seen: dict[Life, int] = {}  # buckets that are counted already
    tick = 0
    for step in range(2000):
        tick += draw.choice((0, 1, 1, 1, 2, 40))
        lives.append(learned.begin(tick, draw.randint(1, 10), draw.uniform(1, 20000), draw.random() < 0.2))
        life = lives[max(int(step - draw.paretovariate(0.5)), 0)]
        if not life.is_over:
            if returned := draw.random() < 0.8:
                learned.end(life, tick)
            else:
                learned.cancel(life)
            ends.setdefault(life, bucket(tick - life.tick) if returned else -1)
        if step % 64 == 0:
            learned.learn(tick)
            for life in lives[learned._forgotten :]:
                outgrown = sum(1 for edge in EDGES[1:] if tick - life.tick >= edge)
                for k in range(seen.get(life, 0), outgrown):
                    entered[life.kind, k] += ends.get(life, BUCKETS) >= k
                    ended[life.kind, k] += ends.get(life, BUCKETS) == k
                seen[life] = outgrown
    assert np.array_equal(learned._entered, entered)
    assert np.array_equal(learned._ended, ended)
    assert ended.sum() > 500
    learned.halve()
    assert np.array_equal(learned._entered, entered / 2)


def test_a_promise_is_the_best_ratio_of_hits_to_time(monkeypatch):
    chance = np.random.default_rng(0).uniform(0, 0.9, (KINDS, BUCKETS))
    monkeypatch.setattr(Returns, "_chances", lambda self: chance)
    widths = np.diff(EDGES)
    for kind in (0, 20, KINDS - 1):
        for k in (1, 7, BUCKETS - 1):
            best, there, hits, time = 0.0, 1.0, 0.0, 0.0
            for p, width in zip(chance[kind, k:], widths[k:], strict=True):
                hits, time = hits + there * p, time + there * width * (1 - p / 2)
                there *= 1 - p
                best = max(best, hits / time if time else 0.0)
            assert Returns().promises()[kind, k] == pytest.approx(best, rel=1e-6)


# -- the policy --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("page_size", "capacity"), [(1, 60), (2, 40), (1, 25)])
def test_the_policy_keeps_its_books_under_mixed_traffic(monkeypatch, page_size, capacity):
    """It learns from fewer uses than usual here, so that all of it happens within a second."""
    for name, value in (("_MORE_GHOSTS", 5), ("_LEARN_LEAST", 30), ("_HALVE_EVERY", 200)):
        monkeypatch.setattr(foresight, name, value)
    policy = Foresight(capacity)
    traffic = Traffic(capacity, policy, capacity, page_size)
    first = policy._promises
    for _ in range(300):
        traffic.step()
    traffic.tree.check()
    assert traffic.hits > 0
    assert not np.array_equal(policy._promises, first), "it has learned"
    assert policy._used_last != policy._could_use_last
    assert len(policy._ghosts) <= capacity + 5
    places = {node: node.record.place for node in traffic.tree.nodes()}
    assert all(policy._leaves._nodes[at] is node for node, at in places.items() if at >= 0)
    assert len(policy._leaves._nodes) == sum(at >= 0 for at in places.values())


# -- by hand -----------------------------------------------------------------------------------------------------


def kind(tree: Tree, *tokens: int) -> str:
    outlook = tree.policy.outlook(tree.find(*tokens).node)
    assert outlook is not None
    return outlook.kind.partition(",")[0]


def test_turns_are_counted_also_over_an_eviction_and_over_a_continuation():
    tree = Tree(policy=Foresight(9))
    tree.use(tree.add(1, 2))
    assert kind(tree, 1, 2) == "turn 2"
    tree.evict(10)
    tree.add(1, 2)
    assert kind(tree, 1, 2) == "turn 3 or 4", "it was evicted as turn 2, and returns"
    tree.add(1, 2, 3)
    assert kind(tree, 1, 2, 3) == kind(tree, 1, 2) == "turn 3 or 4", "a continued sequence waits in the same turn"
    tree.add(5)
    assert kind(tree, 5) == "first turn"


def test_a_prefix_of_many_sequences_is_shared_and_they_are_new():
    tree = Tree(policy=Foresight(99))
    system = tree.add(1, 2)
    for i in range(3, 7):
        tree.add(1, 2, i)
        tree.use(system)
    assert kind(tree, 1, 2) == "shared prefix"
    assert (kind(tree, 1, 2, 5), kind(tree, 1, 2, 6)) == ("turn 3 or 4", "first turn")


def test_a_split_shares_the_wait_and_what_leaves_passes_its_own_on():
    tree = Tree(policy=Foresight(99))
    whole = tree.add(1, 2, 3)
    life = whole.record.life
    other = tree.add(1, 7)
    upper = tree.find(1).node
    assert (upper.record.branches, life.is_over) == (2, True)
    assert whole.record.life is life
    assert upper.record.life is other.record.life, "the branch continues it"
    tree.use(whole)
    assert upper.record.life is other.record.life
    later = whole.record.life
    tree.drop(whole)
    assert upper.record.life is later


def test_the_last_page_of_prompts_goes_first_where_returns_seldom_reuse_it():
    """Prompts that end otherwise each time: a return reads all pages but the last."""
    tree = Tree(policy=Foresight(10**6))
    for i in range(200):
        tree.add(i, 1000, 1001, 2000)
        tree.add(i, 1000, 1001, 3000)  # the split shows that the page 2000 was not reused
    tree.flush()
    tree.add(5000, 5001, 5002)
    assert list(tree.evict(1)) == [tree.numbers - 1]
    assert tree.find(5000, 5001, 5002).pages == array("i", [tree.numbers - 3, tree.numbers - 2])


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

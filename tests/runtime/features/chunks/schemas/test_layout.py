"""Positions, entries and own tokens of random schemas and prompts, against a plain layout of one token at a time."""

from array import array
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from runtime.features.chunks.ask import ModuleAsk
from runtime.features.chunks.schemas.markup import PmlError
from runtime.features.chunks.schemas.schema import Schema
from runtime.models.tokenizer import Tokenizer

WORDS = st.lists(st.sampled_from(["blue", "sea", "and", "tree", "of", "7"]), min_size=1, max_size=4).map(" ".join)
BOS, UNKNOWN = 0, 1


def word_tokenizer(unknown: bool) -> Tokenizer:
    """One token a word; with `unknown`, a BOS before texts and an unknown token as well."""
    words = ["<s>", "<unk>", "blue", "sea", "and", "tree", "of", "7", "say", "well"]
    fast = FastTokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = Whitespace()
    if unknown:
        fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(fast, {}, None)


TOKENIZER = word_tokenizer(True)


# -- random schemas: lists of ("text", words), ("param", name, length, scaffold), ("module", name, content) and
# -- ("union", [modules]); names count up, so that each is unique


@st.composite
def contents(draw, names, depth=0, within=False):
    nodes = []
    kinds = st.sampled_from(["module", "param", "union", "text"])
    for kind in draw(st.lists(kinds, min_size=0 if depth else 2, max_size=4)):
        if kind == "text" and (not nodes or nodes[-1][0] != "text"):
            nodes.append(("text", draw(WORDS)))
        elif kind == "param" and within:
            scaffold = draw(st.sampled_from(["", "blue"]))
            nodes.append(("param", f"p{next(names)}", draw(st.integers(1, 3)), scaffold))
        elif kind == "module" and depth < 3:
            nodes.append(("module", f"m{next(names)}", draw(contents(names, depth + 1, True))))
        elif kind == "union" and depth < 3:
            members = range(draw(st.integers(1, 3)))
            nodes.append(
                ("union", [("module", f"m{next(names)}", draw(contents(names, depth + 1, True))) for _ in members])
            )
    return nodes  # fmt: skip


def to_pml(nodes) -> str:
    pml = ""
    for node in nodes:
        match node:
            case ("text", words):
                pml += words
            case ("param", name, length, scaffold):
                pml += f'<parameter name="{name}" length="{length}" scaffold={quoteattr(scaffold)}/>'
            case ("module", name, content):
                pml += f'<module name="{name}">{to_pml(content)}</module>'
            case ("union", members):
                pml += f"<union>{to_pml(members)}</union>"
    return pml


# -- the plain layout


def words_of(text: str) -> list[int]:
    return [TOKENIZER.token_to_id(word) for word in text.split()]


def plain(nodes, path, position, rows, spans, unions):
    """Fills `rows` (path, position, token, parameter or None) and `spans` by path; returns the position behind."""
    for node in nodes:
        match node:
            case ("text", words):
                for token in words_of(words):
                    rows.append((path, position, token, None))
                    position += 1
            case ("param", name, length, scaffold):
                tokens = (words_of(scaffold) + [UNKNOWN] * length)[:length]
                for token in tokens:
                    rows.append((path, position, token, name))
                    position += 1
            case ("module", name, content):
                start, here = position, f"{path}/{name}"
                position = plain(content, here, start, rows, spans, unions)
                spans[here] = (start, position)
            case ("union", members):
                ends = [plain([member], path, position, rows, spans, unions) for member in members]
                unions.append({f"{path}/{member[1]}" for member in members})
                position = max(ends)
    return position


def entry_rows(entry) -> list[tuple[int, int, bool]]:
    """(position, token, kept) of an entry's tokens."""
    tokens = array("i")
    tokens.frombytes(entry.tokens)
    anchors, holes = entry.anchors, entry.holes
    rows = []
    for index, token in enumerate(tokens):
        at, position = max(anchor for anchor in anchors if anchor[0] <= index)
        rows.append((position + index - at, token, not any(start <= index < stop for start, stop in holes)))
    return rows


def own_rows(prompt) -> list[tuple[int, int]]:
    whole = ModuleAsk(array("i", prompt.tokens).tobytes(), prompt.ask.anchors)
    return [(position, token) for position, token, _ in entry_rows(whole)]


def choose(draw, paths, unions):
    """Paths of modules that can be imported together, parents first."""
    chosen = []
    for path in paths:
        parent = path.rpartition("/")[0]
        twins = next((union for union in unions if path in union), set())
        if (not parent or parent in chosen) and not twins & set(chosen) and draw(st.integers(0, 4)):
            chosen.append(path)
    return chosen


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_schemas_and_prompts(data):
    nodes = data.draw(contents(iter(range(100))))
    rows, spans, unions = [("", 0, BOS, None)], {}, []
    end = plain(nodes, "", 1, rows, spans, unions)
    paths = sorted(spans, key=lambda path: (path.count("/"), int(path.rpartition("m")[2])))
    mode = data.draw(st.sampled_from(["independent", "nested", "scaffold"]))
    sets = [["/", *choose(data.draw, paths, unions)]] if mode == "scaffold" else None
    schema = Schema.read(f'<schema name="s">{to_pml(nodes)}</schema>', TOKENIZER, 8192, mode, sets)
    assert schema.length == end
    assert {m["path"]: (m["start"], m["stop"]) for m in schema.modules()} == {"/": (1, end)} | spans
    for module in schema.modules():
        mates = next((union for union in unions if module["path"] in union), None)
        union = mates and {"start": spans[module["path"]][0], "stop": max(spans[mate][1] for mate in mates)}
        assert module["union"] == union

    chosen = choose(data.draw, paths, unions)
    used = {position for path, position, _, _ in rows if path in ("", *chosen)}
    expected: list[tuple[int, int]] = []
    broken = False

    def references(parent: str) -> str:
        """The prompt's PML within a module, children in any order; notes expected rows of arguments and text."""
        nonlocal broken
        pml, cursor = "", spans[parent][0] if parent else 1
        children = [path for path in chosen if path.rpartition("/")[0] == parent]
        for path in data.draw(st.permutations(children)):
            pml += insert(cursor)
            attributes = ""
            places = {p: pos for own, pos, _, p in reversed(rows) if own == path and p is not None}
            for name, start in places.items():
                argument = data.draw(st.sampled_from(["well", "", "well", "say well"]))
                length = sum(own == path and p == name for own, _, _, p in rows)
                broken |= len(argument.split()) > length
                expected.extend((start + i, token) for i, token in enumerate(words_of(argument)))
                attributes += f' {name}="{argument}"'
            pml += f"<{path.rpartition('/')[2]}{attributes}>{references(path)}</{path.rpartition('/')[2]}>"
            cursor = spans[path][1]
        return pml + (insert(cursor) if parent else "")

    def insert(cursor: int) -> str:
        nonlocal broken
        text = data.draw(st.sampled_from([""] * 9 + ["say", "say well"]))
        for i, token in enumerate(words_of(text)):
            broken |= cursor + i in used or cursor + i >= end
            used.add(cursor + i)
            expected.append((cursor + i, token))
        return text

    pml = f'<prompt schema="s">{references("")}say well</prompt>'
    expected += [(end, 8), (end + 1, 9)]
    if broken:
        with pytest.raises(PmlError):
            schema.compile(pml)
        return
    prompt = schema.compile(pml)
    assert own_rows(prompt) == sorted(expected)
    assert prompt.stop == end + 2

    whole = mode == "scaffold" and all(path in chosen for path in sets[0][1:])
    together = [["", *sets[0][1:]]] if whole else [[""]]
    together += [[path] for path in chosen if path not in together[0]]
    wanted = []
    for group in together:
        mine = sorted((pos, token, p is None) for path, pos, token, p in rows if path in group)
        while mine and not mine[-1][2]:
            mine.pop()
        if mine:
            # What lies around a module of a nested schema, and before it, is seen and not kept.
            inside = f"{group[0]}/"
            around = {path for path in ("", *paths) if mode == "nested" and inside.startswith(f"{path}/")} - {group[0]}
            seen = [row for row in rows if row[0] in around and row[1] < mine[0][0]]
            wanted.append(sorted((pos, token, False) for _, pos, token, _ in seen) + mine)
    got = [entry_rows(entry) for entry in prompt.ask.modules]
    assert sorted(got) == sorted(wanted)
    assert sorted(prompt.rows) == sorted(sum(kept for _, _, kept in mine) for mine in wanted)
    assert prompt.length == sum(prompt.rows) + len(prompt.tokens)


def test_a_placeholder_is_the_unknown_token_or_a_space(tokenizer):
    assert TOKENIZER.placeholder == UNKNOWN
    assert TOKENIZER.leading_ids == [BOS]
    assert tokenizer.leading_ids == []
    assert tokenizer.decode([tokenizer.placeholder]) == " "
    schema = Schema.read(
        "<schema name='s'><module name='a'>x<param name='p' len='2'/>y</module></schema>", tokenizer, 99
    )
    (entry,) = schema.compile("<prompt schema='s'><a/>z</prompt>").ask.modules
    x, y = tokenizer.encode("x"), tokenizer.encode("y")
    assert [token for _, token, _ in entry_rows(entry)] == x + [tokenizer.placeholder] * 2 + y


def test_the_default_scaffold_leaves_unions_out_except_for_the_member_that_they_name():
    members = "<module name='b'>blue</module><module name='c'>sea</module>"
    a = f"<module name='a'>and<union scaffold='c'>{members}</union></module>"
    schema = Schema.read(f"<schema name='s'>of{a}<union>{members}</union></schema>", TOKENIZER, 99, "scaffold")

    def entries(imports: str) -> list[str]:
        prompt = schema.compile(f"<prompt schema='s'>{imports}tree</prompt>")
        return [entry.name for entry in prompt.ask.modules]

    assert entries("<a><c/></a><b/>") == ["/ + /a + /a/c", "/b"]
    assert entries("<a><b/></a><c/>") == ["/", "/a", "/a/b", "/c"]


def test_the_largest_scaffold_counts_where_several_are_imported():
    modules = "".join(f"<module name='{name}'>blue</module>" for name in "abc")
    sets = [["/a", "/b"], ["/c", "/b", "/a"], ["/a", "/c"]]
    schema = Schema.read(f"<schema name='s'>{modules}</schema>", TOKENIZER, 99, "scaffold", sets)

    def entries(imports: str) -> list[str]:
        prompt = schema.compile(f"<prompt schema='s'>{imports}tree</prompt>")
        return [entry.name for entry in prompt.ask.modules]

    assert entries("<a/><b/><c/>") == ["/a + /b + /c", "/"]
    assert entries("<a/><c/>") == ["/a + /c", "/"]
    assert entries("<b/><c/>") == ["/", "/b", "/c"]


def test_what_modules_see_of_the_texts_around_them_is_bounded():
    modules = "".join(f"<module name='m{i}'>blue</module>" for i in range(140))
    pml = f"<schema name='s'>{'sea ' * 7500}{modules}</schema>"
    assert Schema.read(pml, TOKENIZER, 8192).length == 1 + 7500 + 140
    with pytest.raises(PmlError, match=r"/m138, line 1: more than 1048576 tokens are to be encoded"):
        Schema.read(pml, TOKENIZER, 8192, "nested")

"""Schemas and prompts that cannot be served: one error each, with the module's path and the line."""

import tracemalloc

import pytest

from runtime.features.chunks.schemas.markup import MAX_DEPTH, PmlError
from runtime.features.chunks.schemas.pml import Import, Parameter, Prompt, read_schema
from runtime.features.chunks.schemas.schema import Schema

CITIES = """<schema name="cities">
You plan trips.
<module name="plan">For <parameter name="days" length="2"/> days in
  <union>
    <module name="rome">Rome, the eternal city, <module name="food">with its food.</module></module>
    <module name="miami">Miami.</module>
  </union>
</module>
<module name="style">Be brief.</module>
</schema>"""


SCHEMAS = [
    ("", "line 1: this is not XML: no element found"),
    ("<schema name='a'>\n<union><module name='b'>", "/b, line 2: this is not XML"),
    ("<schema name='a'>\n</module></schema>", "line 2: this is not XML: mismatched tag"),
    ("<schema name='a' name='b'/>", "line 1: this is not XML: duplicate attribute"),
    ("<schema name='a'/>\n<schema name='b'/>", "line 2: this is not XML"),
    ("<schema name='a'>\n&what;</schema>", "/, line 2: this is not XML: undefined entity"),
    ("<schema name='a'>\x00</schema>", "this is not XML"),
    ("<schema name='a'>\ud800</schema>", "a lone surrogate"),
    ('<!DOCTYPE s [<!ENTITY a "b">]>\n<schema name="a">&a;</schema>', "line 1: a document type and entities"),
    ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><schema name="a"/>', "a document type and entities"),
    ("<prompt schema='a'/>", "line 1: a schema begins with <schema>"),
    ("<schema/>", "/, line 1: <schema> needs the attribute 'name'"),
    ("<schema name='a' repair='best'/>", "/, line 1: repair: Input should be 'none', 'a3'"),
    ("<schema name='a' ratio='0.1'/>", "/, line 1: the attribute 'ratio' needs repair"),
    ("<schema name='a' repair='a3' ratio='2'/>", "/, line 1: ratio: Input should be less than or equal to 1"),
    ("<schema name='a' repair='pie' ratio='1'/>", "/, line 1: ratio is an option of a3"),
    ("<schema name='a' repair='a3' chunk_tokens='32'/>", "/, line 1: <schema> has no attribute 'chunk_tokens'"),
    ("<schema name='a' src='b'/>", "/, line 1: <schema> has no attribute 'src'"),
    ("<s:schema xmlns:s='t' name='a'/>", "line 1: a schema begins with <schema>, not with <s:schema>"),
    ("<schema xmlns='t' name='a'/>", "/, line 1: <schema> has no attribute 'xmlns'"),
    ("\n<schema " + " ".join(f"a{i}\n= '>\"'" for i in range(1025)) + "/>", "line 2: an element has more than 1024 "),
    ("<schema name='a b'/>", "/, line 1: 'a b' is not a name"),
    ("<schema name='-a'/>", "/, line 1: '-a' is not a name"),
]
IN_A_SCHEMA = [
    ("\n<parameter name='p' length='2'/>", "/, line 2: <parameter> cannot stand in <schema>"),
    ("<module name='b' src='c'/>", "/, line 1: <module> has no attribute 'src'"),
    ("<module/>", "/, line 1: <module> needs the attribute 'name'"),
    ("<module name='2b'/>", "/2b, line 1: '2b' is not a name"),
    ("<module name='user'/>", "/user, line 1: 'user' is a tag"),
    ("<module name='b'/>\n<module name='b'/>", "/b, line 2: there are two modules 'b'"),
    ("<module name='b'/>\n<union><module name='b'/></union>", "/b, line 2: there are two modules 'b'"),
    ("<union/>", "/, line 1: a union needs a module"),
    ("<union>text</union>", "/, line 1: a union may only contain modules"),
    ("<union><union/></union>", "/, line 1: a union may only contain modules"),
    ("<union scaffold='c'><module name='b'/></union>", "/, line 1: the union has no module 'c'"),
    ("text<user>b</user>", "/, line 1: all content of a schema with roles must be in"),
    ("<user>b</user>\n<module name='c'/>", "/, line 2: all content of a schema with roles must be in"),
    ("<user name='x'>b</user>", "/, line 1: <user> has no attribute 'name'"),
    ("<user><system>b</system></user>", "/, line 1: <system> cannot stand in <user>"),
]
IN_A_MODULE = [
    ("\n<p/>", "/b, line 2: <p> cannot stand in <module>"),
    ("<system/>", "/b, line 1: <system> cannot stand in <module>"),
    ("<parameter length='2'/>", "/b, line 1: <parameter> needs the attribute 'name'"),
    ("<param name='c'/>", "/b, line 1: parameter 'c' needs a length"),
    ("<param name='c' len='0'/>", "/b, line 1: parameter 'c' needs a length"),
    ("<param name='c' len='1e3'/>", "/b, line 1: parameter 'c' needs a length"),
    ("<param name='c' len='1' length='1'/>", "/b, line 1: parameter 'c' needs a length"),
    ("<param name='c' len='9'/>\n<param name='c' len='9'/>", "/b, line 2: there are two parameters 'c'"),
    ("<param name='c' len='9'>d</param>", "/b, line 1: parameter 'c' cannot hold anything"),
    ("<param name='c' len='1' scaffold='one two'/>", "/b, line 1: the scaffold of 'c' has 2 tokens"),
    ("\n<param name='c' len='9999999'/>", "/b, line 2: the schema reaches position 8192"),
    ("x " * 9000, "/b, line 1: the schema reaches position"),
    ("x" * 900_000, "a text has 900000 characters"),
]
ALL_SCHEMAS = [
    *SCHEMAS,
    *((f"<schema name='a'>{inner}</schema>", words) for inner, words in IN_A_SCHEMA),
    *((f"<schema name='a'><module name='b'>{inner}</module></schema>", words) for inner, words in IN_A_MODULE),
]
PROMPTS = [
    ("<prompt", "line 1: this is not XML"),
    ("<schema name='cities'/>", "line 1: a prompt begins with <prompt>"),
    ("<prompt>x</prompt>", "line 1: <prompt> needs the attribute 'schema'"),
    ("<prompt schema='cities' mode='x'>x</prompt>", "line 1: <prompt> has no attribute 'mode'"),
    ("<prompt schema='other'>x</prompt>", "names the schema 'other', and not 'cities'"),
]
IN_A_PROMPT = [
    ("\n<paris/>x", "/paris, line 2: there is no module 'paris'"),
    ("<plan>\n<style/></plan>x", "/plan/style, line 2: there is no module 'style' in /plan; it is in /:"),
    ("\n<rome/>x", "/rome, line 2: there is no module 'rome' in /; it is in /plan"),
    ("<plan/>\n<plan/>x", "/plan, line 2: the module is imported twice"),
    ("<plan><rome/>\n<miami/></plan>x", "/plan/miami, line 2: /plan/rome is imported from the same union"),
    ("<plan\nhours='2'/>x", "/plan, line 1: the module has no parameter 'hours'"),
    ("<plan days='one two three'/>x", "/plan, line 1: the argument of 'days' has 3 tokens; the parameter takes 2"),
    ("<plan/>\n in <style/>x", "tokens; 0 fit at position"),
    ("before <plan/>x", "/, line 1: the text has 2 tokens; 0 fit at position 0"),
    ("<plan/>", "needs text after its last module"),
    ("<plan days='" + "x" * 900_000 + "'/>Go.", "a text has 900003 characters"),
    ("<plan/>  \n ", "needs text after its last module"),
    ("<plan/><user>x</user>", "a schema without <system>, <user> and <assistant>"),
    ("<user>x</user><plan/>x", "/, line 1: <user> must follow the last module"),
    ("<plan><user>x</user></plan>x", "/plan, line 1: <user> must follow the last"),
    ("<plan/>x<user>y</user>", "line 1: there is text outside of <system>"),
    ("\n<user>a <plan/></user>", "line 2: <user> of a prompt takes only text"),
]
ALL_PROMPTS = [*PROMPTS, *((f"<prompt schema='cities'>{inner}</prompt>", words) for inner, words in IN_A_PROMPT)]


@pytest.mark.parametrize(("pml", "words"), ALL_SCHEMAS)
def test_a_schema_that_cannot_be_served(pml, words, tokenizer):
    with pytest.raises(PmlError) as error:
        Schema.read(pml, tokenizer, 8192)
    assert words in error.value.message
    assert (error.value.status, error.value.param, error.value.code) == (400, "pml", "invalid_pml")


@pytest.mark.parametrize(("pml", "words"), ALL_PROMPTS)
def test_a_prompt_that_does_not_fit(pml, words, tokenizer):
    schema = Schema.read(CITIES, tokenizer, 8192)
    with pytest.raises(PmlError) as error:
        schema.compile(pml)
    assert words in error.value.message
    assert schema.compile("<prompt schema='cities'><plan days='2'><rome><food/></rome></plan><style/>Go.</prompt>")


def test_a_child_without_its_parent(tokenizer):
    schema = Schema.read(CITIES, tokenizer, 8192)
    rome, plan = Import(("plan", "rome")), Import(("plan",))
    with pytest.raises(PmlError, match=r"/plan/rome: /plan, which holds the module, is not imported"):
        schema.compile(Prompt("cities", [rome], text="Go."))
    assert schema.compile(Prompt("cities", [rome, plan], text="Go."))


def test_texts_do_not_overlap_where_an_empty_module_lies(tokenizer):
    modules = "<module name='a'>one</module><module name='b'>two two</module><module name='e'/>"
    modules += "<module name='g'>six six six</module><module name='z'/>"
    schema = Schema.read(f"<schema name='s'>{modules}</schema>", tokenizer, 99)
    assert schema.compile("<prompt schema='s'><a/> at at<e/> at<z/>Go.</prompt>")
    with pytest.raises(PmlError, match="/e, line 1: the text has 1 tokens; 0 fit"):
        schema.compile("<prompt schema='s'><a/> at at at<e/> at<z/>Go.</prompt>")


def test_mode_and_scaffolds_fit_each_other(tokenizer):
    for mode, scaffolds, words in [
        ("independent", [["/plan"]], "scaffolds need the mode scaffold"),
        ("scaffold", [["/plan", "/paris"]], "/paris: a scaffold names a module that the schema does not have"),
        (
            "scaffold",
            [["/plan/rome/food", "/plan/miami"]],
            "/plan/miami: the scaffold also has /plan/rome, of the same union",
        ),
    ]:
        with pytest.raises(PmlError, match=words):
            Schema.read(CITIES, tokenizer, 8192, mode, scaffolds)


def test_white_space_is_layout_where_it_stands_alone_but_not_between_parameters():
    schema = read_schema(
        "<schema name='a'>\n <!-- no token --> <module name='b'> c\n</module>\n"
        "<module name='d'><param name='e' len='1'/> <parameter name='f' length='2'/> <module name='f'/>"
        "</module></schema>"
    )
    b, d = schema.content
    assert [node.text for node in b.content] == [" c\n"]
    assert [node.length if isinstance(node, Parameter) else node.text for node in d.content[:3]] == [1, " ", 2]
    assert [node.name for node in d.content[3:]] == ["f"]


def test_a_comment_within_text_is_no_token():
    (text,) = read_schema("<schema name='a'>one<!-- two -->three &amp; four</schema>").content
    assert text.text == "onethree & four"


BOMB = "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(20))
HOSTILE = {
    "open": "<a>" * (1 << 20),
    "deep": "<schema name='a'>" + "<module name='b'>" * (MAX_DEPTH + 1),
    "wide": "<schema name='a'>" + "<module name='b'/>" * 13_000,
    "comments": "<schema name='a'>" + "<!---->a" * 500_000 + "</schema>",
    "escapes": "<schema name='a'>" + "&amp;" * 800_000 + "</schema>",
    "long": "<schema name='a'>" + "x" * (5 << 20) + "</schema>",
    "members": "<schema name='a'><union>"
    + "".join(f"<module name='m{i}'><param name='p' len='8000'/></module>" for i in range(5_000))
    + "</union></schema>",
    "attributes": "<schema name='a' " + " ".join(f"a{i}=''" for i in range(100_000)) + "/>",
    "namespace": f"<schema name='a' xmlns:b='{'n' * 300_000}'>{''.join(f'<b:c{i}/>' for i in range(500))}</schema>",
    "bomb": f'<!DOCTYPE s [<!ENTITY a "{"a" * 1000}">{BOMB}]><schema name="a">&u;</schema>',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_take_little_memory(name, tokenizer):
    tracemalloc.start()
    try:
        with pytest.raises(PmlError):
            Schema.read(HOSTILE[name], tokenizer, 8192)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_ten_thousand_modules(tokenizer):
    words = "".join(f"<module name='m{i}'>word {i}</module>" for i in range(9_000))
    members = words + "".join(f"<module name='n{i}'>word <param name='p' len='3'/></module>" for i in range(1_000))
    schema = Schema.read(f"<schema name='a'><union>{members}</union></schema>", tokenizer, 8192, "scaffold")
    assert len(schema.modules()) == 10_001
    assert schema.length < 20
    prompt = schema.compile("<prompt schema='a'><n999 p='x'/>Go.</prompt>")
    assert [entry.name for entry in prompt.ask.modules] == ["/n999"]

"""Functions as PML: each statement's place in the schema, and the imports of a call."""

import pytest

from runtime import prompt_program, role
from runtime.features.chunks.schemas.schema import Schema

HOTELS = "Hotels have <stars>."


@prompt_program(stars=3)
def hotel(stars, pool=False):
    """Where to sleep."""
    yield f"A hotel of {stars} stars"
    yield "."
    if pool:
        yield " With a pool."


@prompt_program(days=4)
def trip(days, city, weeks=1, luxury=True):
    yield "You plan trips."
    yield f"Plan {days} days."
    match city:
        case "rome":
            yield "Rome is old."
        case "miami":
            yield "Miami has beaches."
            yield from hotel("five" if luxury else "two", pool=weeks > 1)
        case _:
            yield "Any city."
    if weeks > 2:
        yield "A long trip"
    elif weeks == 2:
        yield "Two weeks"
    else:
        yield "A short trip"
    yield HOTELS


SCHEMA = (
    '<schema name="trip">You plan trips.<module name="days">Plan <parameter name="days" length="4"/> days.</module>'
    '<union><module name="rome">Rome is old.</module><module name="miami">Miami has beaches.<module name="hotel">'
    'A hotel of <parameter name="stars" length="3"/> stars.<module name="pool"> With a pool.</module></module></module>'
    '<module name="otherwise">Any city.</module></union>'
    '<union><module name="weeks_2">A long trip</module><module name="weeks_2_2">Two weeks</module>'
    '<module name="otherwise_2">A short trip</module></union>Hotels have &lt;stars&gt;.</schema>'
)


def test_a_function_becomes_a_schema():
    assert trip.schema == SCHEMA


@pytest.mark.parametrize(
    ("arguments", "imports"),
    [
        ({"city": "rome"}, '<days days="3"/><rome/><otherwise_2/>'),
        ({"city": "paris", "weeks": 3}, '<days days="3"/><otherwise/><weeks_2/>'),
        (
            {"city": "miami", "weeks": 2},
            '<days days="3"/><miami><hotel stars="five"><pool/></hotel></miami><weeks_2_2/>',
        ),
        ({"city": "miami", "luxury": 0}, '<days days="3"/><miami><hotel stars="two"/></miami><otherwise_2/>'),
    ],
)
def test_a_call_becomes_a_prompt(arguments, imports, tokenizer):
    prompt = trip.prompt("Go & see.", days="3", **arguments)
    assert prompt == f'<prompt schema="trip">{imports}Go &amp; see.</prompt>'
    compiled = Schema.read(trip.schema, tokenizer, 8192).compile(prompt)
    assert compiled.tokens[-3:] == tokenizer.encode("Go & see.")[-3:]


def test_a_program_yields_its_plain_text_as_well():
    assert "".join(trip("3", "miami", weeks=2)) == (
        "You plan trips.Plan 3 days.Miami has beaches.A hotel of five stars. With a pool.Two weeks" + HOTELS
    )


def test_roles_and_quotes():
    @prompt_program(name=8)
    def talk(name, polite):
        with role("system"):
            yield "Be kind."
        with role("user"):
            yield f"I am {name}."
            if not polite:
                yield "Hurry."
        with role("assistant"):
            yield "Hello."

    assert talk.schema == (
        '<schema name="talk"><system>Be kind.</system><user><module name="name">I am '
        '<parameter name="name" length="8"/>.</module>'
        '<module name="not_polite">Hurry.</module></user><assistant>Hello.</assistant></schema>'
    )
    assert talk.prompt(name='"A"\n<b>', polite=False) == (
        """<prompt schema="talk"><name name='"A"&#10;&lt;b&gt;'/><not_polite/></prompt>"""
    )


def test_other_statements_are_refused_with_their_line():
    @prompt_program()
    def counts(n):
        for i in range(n):
            yield str(i)

    @prompt_program()
    def shows(n):
        yield f"{n} days"

    @prompt_program()
    def calls():
        yield from iter("a")

    @prompt_program()
    def recurs():
        yield from recurs()

    for program, words in [
        (counts, "counts, line .*: a prompt program cannot do 'for i in range"),
        (shows, "cannot do 'n'"),
        (calls, "cannot do .iter"),
        (recurs, "recurs calls itself"),
    ]:
        with pytest.raises(TypeError, match=words):
            _ = program.schema
    with pytest.raises(TypeError, match="no argument 'm'"):
        prompt_program(m=2)(hotel.function)
    with pytest.raises(TypeError, match="missing a required argument: 'city'"):
        trip.prompt("x", days="3")

"""The examples: each schema is served, and its prompt fits it."""

from pathlib import Path

import pytest

from runtime.features.chunks.schemas.schema import Schema
from server.features.chunks.examples import trips

ROOM = Path(trips.__file__).parent


@pytest.mark.parametrize("mode", ["independent", "nested", "scaffold"])
@pytest.mark.parametrize("name", ["code", "personas", "trips"])
def test_an_example_is_served(name, mode, tokenizer):
    schema = Schema.read((ROOM / f"{name}.pml").read_text(), tokenizer, 8192, mode)
    prompt = schema.compile((ROOM / f"{name}.prompt.pml").read_text())
    assert 0 < len(prompt.tokens) < sum(prompt.rows)
    assert tokenizer.decode(prompt.tokens, False).endswith("<|im_start|>assistant\n")


def test_the_program_is_served(tokenizer):
    schema = Schema.read(trips.trips.schema, tokenizer, 8192, "nested")
    for country, city, modules in [
        ("italy", "", ["/", "/duration", "/italy"]),
        ("home", "Porto", ["/", "/duration", "/home/home"]),
    ]:
        prompt = schema.compile(trips.trips.prompt("When?", duration="two weeks", country=country, city=city))
        assert [entry.name for entry in prompt.ask.modules] == modules


def test_every_schema_has_a_prompt_and_is_in_the_table():
    readme = (ROOM / "README.md").read_text()
    names = {path.name for path in ROOM.glob("*.pml")}
    assert names == {f"{stem}{end}" for stem in ("code", "personas", "trips") for end in (".pml", ".prompt.pml")}
    assert all(f"`{name}`" in readme for name in names)

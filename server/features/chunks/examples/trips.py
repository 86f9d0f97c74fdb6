"""The schema of trips.pml as a Python program. The third request repeats the first one, whose modules are cached."""

from collections.abc import Iterator

from runtime import Engine, prompt_program, role


@prompt_program(city=10)
def home(city: str) -> Iterator[str]:
    yield f"I want to stay in my own country and go to {city}, because I know too little of it. "


@prompt_program(duration=5)
def trips(duration: str, country: str, city: str = "") -> Iterator[str]:
    with role("system"):
        yield "You plan journeys. You know the sights, the food and the trains."
    with role("user"):
        yield f"Please plan a journey of {duration} for me. "
        match country:
            case "home":
                yield from home(city)
            case "italy":
                yield "I think of Rome: ruins, fountains, and coffee at the counter. "
            case "japan":
                yield "I think of Tokyo: crowds, temples, and small restaurants in which nobody speaks. "
    with role("assistant"):
        yield "With pleasure. What matters most to you?"


if __name__ == "__main__":
    print(trips.schema)
    with Engine() as engine:
        schema = engine.schema(trips.schema)
        for country in ("italy", "japan", "italy"):
            prompt = trips.prompt("Good food. What do I do first?", duration="three days", country=country)
            (output,) = engine.generate(schema.compile(prompt), {"max_new_tokens": 48, "temperature": 0})
            print(prompt, output.reuse, output.text, sep="\n")

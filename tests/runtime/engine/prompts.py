"""Real prompts: chat, code, long, multilingual, some with shared beginnings."""

SYSTEM = (
    "You are a careful assistant for the botanical garden of a small town. Answer in one or two sentences, name the "
    "plant that is meant, and say honestly when you do not know. Visitors ask about clonal plants, about watering, and "
    "about the paths between the houses. The garden opens at nine and closes at dusk."
)
STORY = (
    "The aspen grove on the north slope looks like a forest, but below the ground it is a single tree. Every stem that "
    "the walker passes grew from the same root, and each of them carries the same wood, the same leaves and the same "
    "age. When one stem falls, the root sends up another. "
)
CODE = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
'''


def chat(user: str, system: str = SYSTEM) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


CHATS = [
    chat("When does the garden open?"),
    chat("Which plant is the oldest clone you have?"),
    chat("How often should I water a fern?"),
    chat("What is 17 + 25?", "You are a calculator."),
    chat("Translate 'root' into French.", "You translate."),
]
TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at",
    CODE,
    CODE + "        if left[i] <= right[j]:\n",
    "SELECT name, count(*) FROM plants GROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n",
    '{"name": "aspen", "stems": [1, 2, 3], "root":',
    "Die Wurzel eines Baumes ist",
    "La capitale de l'Italie est",
    "El árbol más viejo del mundo",
    "日本で一番高い山は",
    "Столица России —",
    "🌱🌳🌲 means",
    "x",
    STORY * 3 + "In short,",
    STORY * 3 + "The moral of the story is",
    STORY * 8 + "The walker asks:",
]


def all_prompts(tokenizer) -> list[list[int]]:
    """Token ids of all of them."""
    chats = [tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False) for messages in CHATS]
    return chats + [tokenizer.encode(text) for text in TEXTS]

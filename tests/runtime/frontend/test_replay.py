"""Replay of sampled tokens: random tokenizations, templates and tools; prompts differ within replayed answers alone."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix import Namespace
from runtime.config import SchedulerConfig
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Encoded, MarkedText, Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.replay import _TRIED, MOST_OF_ACCOUNT, NOTHING, EarlierAnswer, Replay
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import AddRequest, Admission, Finish, TokenEvent
from server.openai.tools import Tool, render_chat
from tests.namespaces import others
from tests.runtime.frontend.listening import Listener, ids_of
from tests.runtime.frontend.test_request_ids import INFO

TEMPLATES = {
    "chatml": None,
    # White space around contents is dropped, thoughts of earlier turns are, too, and calls are JSON.
    "trims": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '').split('</think>')[-1] | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ tools and '' }}",
    # No token marks the end of a turn.
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
SPACE = Namespace("a")
TOOL = Tool.model_validate({"type": "function", "function": {"name": "plant"}})
ANSWERS = st.one_of(
    st.text(" abé<{\n\u4e16oak", min_size=1, max_size=30),
    st.builds("I call.{}<tool_call>\n{{\"name\": \"plant\", \"arguments\": {{\"n\": {}}}}}\n</tool_call>".format,
              st.sampled_from(["", "\n", "\n\n"]), st.integers(0, 99)),
    st.builds("<think>{}</think>\n\nAn oak.".format, st.text("ab ", max_size=9)),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tiny_dir) -> dict[str, Tokenizer]:
    own = Tokenizer.load(tiny_dir)
    return {name: Tokenizer(own._fast, own._config, text or own.chat_template) for name, text in TEMPLATES.items()}


def sampled(tokenizer: Tokenizer, text: str, draw: random.Random) -> list[int]:
    """Random tokens of a text, as a model may sample them: each piece of the text has the tokenizer's own tokens."""
    ids, at = [], 0
    while at < len(text):
        size = draw.randrange(1, 6)
        ids += tokenizer.encode(text[at : at + size], add_special_tokens=False)
        at += size
    return ids


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(TEMPLATES)), answers=st.lists(ANSWERS, min_size=1, max_size=4), seed=st.integers())
def test_a_prompt_differs_within_replayed_answers_alone(tokenizers, kind, answers, seed):
    tokenizer, draw = tokenizers[kind], random.Random(seed)
    inputs = InputProcessor(INFO, tokenizer, SchedulerConfig())
    turns = [{"role": "user", "content": "Plant."}]
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    spans: list[tuple[int, int]] = []
    for answer in [*answers, None]:
        text = render_chat(tokenizer, turns, [TOOL] if seed % 2 else [])
        submission = inputs.encode(Submission(text, add_special_tokens=False, account="a"))
        tokens = ids_of(submission)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        plain = inputs.tokenizer.encode(text, add_special_tokens=False)
        if submission.said.sampled == 0:
            assert tokens == plain
        outside = lambda ids, ends: [  # noqa: E731
            (token, stop) for token, stop in zip(ids, ends, strict=True) if not any(a <= stop <= b for a, b in spans)
        ]
        plain_ends = tokenizer.encode_with_ends(text, False)[1]
        assert outside(tokens, submission.said.ends) == outside(plain, plain_ends)
        if answer is not None:
            said = sampled(tokenizer, answer, draw) + (end if draw.random() < 0.8 else [])
            spans.append((len(text), len(text) + len(answer)))
            inputs.replay.add(
                "a", SPACE, EarlierAnswer(text, array("i", tokens), submission.said.ends, 0, array("i", said))
            )
            turns += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": draw.choice(["More.", "é"])},
            ]


def test_the_next_turn_reads_the_sampled_tokens(tokenizers):
    """Over the front end: what the engine sampled comes back in the next prompt, with breakpoints where they were."""
    tokenizer, sent = tokenizers["chatml"], []
    frontend = OutputProcessor(InputProcessor(INFO, tokenizer, SchedulerConfig()), sent.append)
    turns = [{"role": "user", "content": "Name a tree."}]
    odd = [*(tokenizer.encode(letter, False)[0] for letter in "Oak trees"), *tokenizer.encode("\n<|im_end|>", False)]

    def ask(**fields) -> Encoded:
        text = render_chat(tokenizer, turns, [])
        marked = MarkedText(text, [(text.index("Name"), 60.0), (len(text), 60.0)])
        asked = Submission(marked, SamplingParams(max_new_tokens=9), account="a", add_special_tokens=False, **fields)
        encoded = frontend.inputs.encode(asked)
        frontend.submit(encoded, Listener(lambda _: None))
        return encoded

    first = ask()
    event = TokenEvent(sent[-1].rid, odd, Finish("stop"), admission=Admission())
    frontend.take([event])
    turns += [{"role": "assistant", "content": "Oak trees"}, {"role": "user", "content": "More."}]
    second = ask()
    message = sent[-1]
    assert isinstance(message, AddRequest)
    kept = odd[:-2]  # the template drops the line's end
    assert list(second.said.tokens[len(first.said.tokens) :][: len(kept)]) == kept
    assert second.said.sampled == len(kept)
    assert [place for place, _ in second.breakpoints] == [first.breakpoints[0][0], len(second.said.tokens)]
    assert ask(replay=False).said is None
    frontend.inputs.replay.erase("a")
    assert ask().said.sampled == 0


def test_memory_is_bounded_and_no_account_s_answers_are_another_s(tokenizers):
    clock = [0.0]
    replay = Replay(tokenizers["chatml"], lambda: clock[0])
    ids = array("i", tokenizers["chatml"].encode("x<|im_end|>", False))
    for i in range(20):
        prompt = f"{i:02}" * (MOST_OF_ACCOUNT // 20)
        replay.add("a", SPACE, EarlierAnswer(prompt, array("i", [1]), array("i", [len(prompt)]), 0, ids))
    assert sum(said.size for _, said in replay._said.items("a")) <= MOST_OF_ACCOUNT
    again = prompt + "x<|im_end|> y"
    assert replay.find("a", SPACE, again).sampled == len(ids)
    for account, space in (("b", SPACE), *(("a", other) for other in others(SPACE))):
        assert replay.find(account, space, again) == NOTHING
    clock[0] = 1e6
    assert replay.find("a", SPACE, again) == NOTHING


def test_long_answers_count_and_equal_ones_count_once(tokenizers):
    replay = Replay(tokenizers["chatml"])
    answer = array("i", [7] * 10_000)
    for i in range(2000):
        replay.add("a", SPACE, EarlierAnswer(f"{i}", array("i", [1]), array("i", [1]), 0, answer))
    assert sum(len(said.answer) * 4 for _, said in replay._said.items("a")) < MOST_OF_ACCOUNT
    replay.erase("a")
    for _ in range(20):
        replay.add("a", SPACE, EarlierAnswer("x", array("i", [1]), array("i", [1]), 0, answer))
    assert len(replay._said.items("a")) == 1


def test_answers_that_cannot_be_replayed_take_bounded_time(tokenizers):
    """The template marks no turn's end, so every answer of the history is compared in vain."""
    tokenizer = tokenizers["plain"]
    replay, words, read = Replay(tokenizer), tokenizer.encode(" oak" * 512, add_special_tokens=False), []
    text = tokenizer.decode(words * 300, skip_special_tokens=False)
    for i in range(300):
        prompt = text[: i * len(text) // 300]
        replay.add("a", SPACE, EarlierAnswer(prompt, array("i", [1]), array("i", [1]), 0, array("i", words)))
    decode, tokenizer.token_text = tokenizer.token_text, lambda token: read.append(token) or decode(token)
    try:
        assert replay.find("a", SPACE, text) == NOTHING
    finally:
        del tokenizer.token_text
    assert len(read) < 4 * (_TRIED + len(words))

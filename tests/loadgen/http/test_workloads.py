"""Workloads: lengths, shared prefixes, order, and equal sessions for equal seeds."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from loadgen.http.prose import CHARS_PER_TOKEN, Prose, corpus_sentences, vocabulary
from loadgen.http.session import Conversation, Message
from loadgen.http.workloads import WORKLOADS
from loadgen.http.workloads.base import length
from loadgen.http.workloads.dialogues import Agents, Chat
from loadgen.http.workloads.file import File
from loadgen.http.workloads.prompts import Diffusion, FewShot, Rag, SharedPrefix, Unique
from loadgen.http.workloads.trace import Trace, read_trace
from tests.loadgen.helpers import sessions, text_of

SYNTHETIC = [kind for name, kind in WORKLOADS.items() if name not in ("file", "trace")]


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_a_seed_gives_the_same_sessions_again(kind):
    workload = kind()
    assert sessions(workload, 5) == sessions(workload, 5)
    assert sessions(workload, 5) != sessions(workload, 5, seed=2)


def test_text_reads_like_language():
    """Words as frequent as in the corpus: neither one word repeated nor all alike."""
    words = Prose(random.Random(1)).text(30000).split()
    counts = Counter(words)
    assert len(words) > 20000
    assert len(counts) > 0.8 * len(vocabulary())
    (top, most), *_ = counts.most_common(1)
    assert top in ("the", "of", "and")
    assert 0.02 < most / len(words) < 0.12
    corpus = Counter(word for sentence in corpus_sentences() for word in sentence)
    shares = np.array([[counts[w] / len(words), corpus[w] / corpus.total()] for w, _ in corpus.most_common(50)])
    assert np.corrcoef(shares.T)[0, 1] > 0.9


def test_text_is_as_long_as_wanted():
    prose = Prose(random.Random(1), cost=lambda word: 1)
    assert [len(prose.text(n).split()) for n in (1, 2, 17, 500)] == [1, 2, 17, 500]
    prose = Prose(random.Random(1))
    for n in (10, 100, 3000):
        assert len(prose.text(n)) / CHARS_PER_TOKEN == pytest.approx(n, abs=3)


def test_a_key_gives_the_same_text_whatever_came_before():
    prose = Prose(random.Random(1))
    first = prose.reseeded("block", 7).text(40)
    prose.text(100)
    assert prose.reseeded("block", 7).text(40) == first != prose.reseeded("block", 8).text(40)


def test_shared_prefix_asks_every_group_equally():
    workload = SharedPrefix(groups=3, questions=4)
    made = sessions(workload, workload.requests(1))
    assert Counter(session.group for session in made) == {f"group {i}": 4 for i in range(3)}
    prefixes = {session.group: session.turns[0].messages[0].content for session in made}
    assert len(set(prefixes.values())) == 3
    for session in made:
        (turn,) = session.turns
        assert turn.messages[0].content == prefixes[session.group]
        assert Conversation(False, list(turn.messages)).as_text().startswith(prefixes[session.group] + "\n\n")
    assert len({text_of(session) for session in made}) == len(made)


def test_a_share_of_the_shared_prefixes_is_cold():
    made = sessions(SharedPrefix(groups=2, questions=50, prefix_tokens=length("30"), cold=0.3), 100)
    cold = [session.turns[0].messages[0].content for session in made if session.group == "cold"]
    warm = {session.turns[0].messages[0].content for session in made if session.group != "cold"}
    assert 15 < len(cold) < 45
    assert len(set(cold)) == len(cold)
    assert len(warm) == 2
    assert warm.isdisjoint(cold)


def test_rag_changes_the_order_of_its_documents():
    made = sessions(Rag(documents=3, per_prompt=3, document_tokens=length("20")), 60)
    assert len({session.group for session in made}) == 6
    assert len({"".join(sorted(session.turns[0].messages[1].content)) for session in made}) == 1


def test_few_shot_and_diffusion_share_their_examples():
    made = sessions(FewShot(shots=3), 4)
    assert len({session.turns[0].messages[0].content for session in made}) == 1
    assert made[0].turns[0].messages[0].content.count("Question: ") == 3
    lengths = {session.turns[0].output_tokens for session in sessions(Diffusion(blocks=length("uniform:1:3")), 50)}
    assert lengths == {32, 64, 96}


def test_unique_prompts_share_nothing():
    texts = [text_of(session) for session in sessions(Unique(), 100)]
    assert len({text[:80] for text in texts}) == 100


@pytest.mark.parametrize("api_text", [True, False])
@pytest.mark.parametrize("kind", [Chat, Agents])
def test_earlier_turns_are_a_prefix_of_later_ones(kind, api_text):
    (session,) = sessions(kind(turns=length("4")), 1)
    conversation, before = Conversation(session.dialogue), None
    for turn in session.turns:
        conversation.add(turn.messages)
        now = conversation.as_text() if api_text else conversation.as_chat()
        assert before is None or now[: len(before)] == before
        before = now
        conversation.add([Message.of("assistant", " " + (turn.scripted_answer or ""))])
    if not api_text:
        assert {entry["role"] for entry in conversation.as_chat()} == {"system", "user", "assistant"}


def write_lines(path, entries):
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_sharegpt(tmp_path):
    talk = {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hello"},
                              {"from": "gpt", "value": "x" * 42}, {"from": "human", "value": "And then?"}]}  # fmt: skip
    for name, text in (("a.jsonl", json.dumps(talk)), ("b.json", json.dumps([talk]))):
        (tmp_path / name).write_text(text)
        (session,) = sessions(File(tmp_path / name, output_tokens=length("9")))
        assert [[m.role for m in turn.messages] for turn in session.turns] == [["system", "user"], ["user"]]
        assert [turn.output_tokens for turn in session.turns] == [10, 9]
        assert session.turns[0].scripted_answer == "x" * 42


def test_messages_batches_and_prompts(tmp_path):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "Ho"},
                {"role": "user", "content": "Why?"}]  # fmt: skip
    entries = [
        {"messages": messages, "max_tokens": 5},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}},
        {"prompt": "Once", "output_len": 3},
        {"prompt": "Twice"},
    ]
    made = sessions(File(write_lines(tmp_path / "f", entries)))
    assert [[turn.output_tokens for turn in session.turns] for session in made] == [[5], [128], [3], [128]]
    assert [message.content for message in made[0].turns[0].messages] == ["Hi", "Ho", "Why?"]
    assert [text_of(session) for session in made[2:]] == ["Once", "Twice"]


@pytest.mark.parametrize(
    "line", ["{", '{"question": 1}', "[1", "7", '{"conversations": [{"from": "gpt", "value": ""}]}']
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "f.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        sessions(File(path))


MOONCAKE = [
    {"timestamp": 1000, "input_length": 1200, "output_length": 30, "hash_ids": [1, 2, 3]},
    {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 4]},
    {"timestamp": 5000, "input_length": 600, "output_length": 10, "hash_ids": [9, 8]},
    {"timestamp": 9000, "input_length": 100, "output_length": 10, "hash_ids": [1]},
]


def test_mooncake_blocks_become_the_same_text_wherever_they_stand(tmp_path):
    path = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    made = sessions(Trace(path, speed=2.0))
    assert [session.at_s for session in made] == [0, 0, 2, 4]
    assert [session.turns[0].output_tokens for session in made] == [30, 20, 10, 10]
    parts = [session.turns[0].messages[0].parts for session in made]
    assert parts[0][:2] == parts[1][:2]
    assert parts[0][2] != parts[1][2]
    # The one block of the last request is the first 100 tokens of the block that others have whole.
    assert parts[0][0].startswith(parts[3][0].strip()[:-20])
    for session, tokens in zip(made, (1200, 1100, 600, 100), strict=True):
        assert len(text_of(session)) / CHARS_PER_TOKEN == pytest.approx(tokens, rel=0.02)


def test_a_window_of_a_trace_shrunk(tmp_path):
    path = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    (session,) = sessions(Trace(path, window_start=3, window=3, shrink=0.25))
    assert session.at_s == 1
    assert session.turns[0].output_tokens == 2
    assert len(text_of(session)) / CHARS_PER_TOKEN == pytest.approx(150, rel=0.03)
    assert len(sessions(Trace(path, max_tokens=700))) == 2


def test_azure_times_and_lengths(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9799600,48,10\n2023-11-17 00:00:01.0299600,31,8\n"
        "2023-11-17 00:00:00.0319600+00:00,10,3\n"
    )
    assert [(round(row.at_s, 5), row.input_tokens, row.output_tokens) for row in read_trace(path)] == [
        (0, 48, 10), (0.052, 10, 3), (1.05, 31, 8)]  # fmt: skip
    assert len({text_of(session)[:20] for session in sessions(Trace(path))}) == 3


@pytest.mark.parametrize("text", ["", "{}\n", '{"timestamp": 0}', "TIMESTAMP,Other\nx,1\n", "1,2,3\n4,5,6\n"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no requests|line"):
        sessions(Trace(path))


def test_a_recorded_trace_says_its_blocks_and_tenants(tmp_path):
    path = tmp_path / "own.jsonl"
    entry = {"timestamp": 5000, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3], "block_tokens": 16}
    path.write_text(json.dumps(entry | {"tenant": "alice"}) + "\n")
    (row,) = read_trace(path)
    assert (row.block_tokens, row.tenant, row.blocks) == (16, "alice", (1, 2, 3))
    (session,) = sessions(Trace(path), 1)
    assert session.group == "alice"
    (message,) = session.turns[0].messages
    assert len(message.parts) == 3, "two whole blocks, and one of 8 tokens"
    assert len(message.parts[2]) < len(message.parts[0])

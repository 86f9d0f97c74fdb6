"""Request ids that are used again."""

from contextlib import nullcontext

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest, RametError, RateLimited
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import Abort, AddRequest, Finish, ModelInfo, TokenEvent
from tests.runtime.frontend.listening import Listener
from tests.runtime.frontend.test_limits import FewTokens

INFO = ModelInfo(
    name="m",
    path="",
    architecture="",
    dtype="",
    device="",
    attention_backend="",
    vocab_size=49152,
    context_length=1024,
    page_size=16,
    pool_tokens=1024,
    eos_token_ids=[],
)


@pytest.fixture
def sent():
    return []


@pytest.fixture
def frontend(tokenizer, sent):
    return OutputProcessor(InputProcessor(INFO, tokenizer, SchedulerConfig()), sent.append)


def submit(stream: OutputStream, *rids: str) -> None:
    for rid in rids:
        frontend = stream._frontend
        frontend.submit(frontend.inputs.encode(Submission([1], rid=rid)), stream)


@pytest.mark.parametrize(("refused", "kind"), [(True, InvalidRequest), (False, RametError)])
def test_an_engine_s_refusal_is_the_client_s_fault_and_its_failure_is_not(frontend, sent, refused, kind):
    outputs = []
    frontend.submit(frontend.inputs.encode(Submission([1], rid="a")), Listener(outputs.append))
    finish = Finish("error", message="no", refused=refused, code="why", param="text")
    frontend.take([TokenEvent(sent[-1].rid, [], finish)])
    (error,) = outputs
    assert (type(error), error.message, error.code, error.param) == (kind, "no", "why", "text")


def test_a_stream_that_is_closed_leaves_the_successor_of_a_finished_id_alone(frontend, sent):
    first, second = OutputStream(frontend), OutputStream(frontend)
    submit(first, "one", "two")
    with pytest.raises(InvalidRequest, match="in use"):
        submit(second, "one")
    one, two = (message.rid for message in sent if isinstance(message, AddRequest))
    frontend.take([TokenEvent(one, [5], Finish("stop"))])
    submit(second, "one")
    successor = sent[-1].rid
    first.close()
    assert [message.rid for message in sent if isinstance(message, Abort)] == [two]
    assert frontend.num_open == 1
    second.close()
    assert sent[-1] == Abort(successor)
    assert frontend.num_open == 0


class Lives(RuleBasedStateMachine):
    """Clients of two accounts with few ids; the model: by account and id, the client and its live completions."""

    tokenizer: Tokenizer
    clients = Bundle("clients")

    def __init__(self):
        super().__init__()
        self.sent = []
        limits = FewTokens(max_running=4, max_waiting=30, key_share=0.12)
        self.frontend = OutputProcessor(InputProcessor(INFO, self.tokenizer, limits), self.sent.append)
        self.live: dict[tuple[str, str], tuple[OutputStream, list[str]]] = {}
        self.waiting: dict[str, tuple[str, int]] = {}  # by the engine's id: account and tokens

    def of(self, account: str) -> list[str]:
        return [rid for (whose, _), (_, rids) in self.live.items() if whose == account for rid in rids]

    def forget(self, rid: str) -> None:
        self.waiting.pop(rid, None)
        for key, (_, rids) in list(self.live.items()):
            if rid in rids:
                rids.remove(rid)
            if not rids:
                del self.live[key]

    @rule(target=clients)
    def come(self):
        return OutputStream(self.frontend)

    @rule(client=clients, account=st.sampled_from(["a", "a", "b"]), rid=st.sampled_from("xy"), n=st.integers(1, 3))
    def submit(self, client, account, rid, n):
        before, tokens = len(self.sent), [1] * (n + 2)
        queued = sum(size for whose, size in self.waiting.values() if whose == account)
        full = len(self.of(account)) + n > 4 or bool(queued and queued + len(tokens) > 12)
        refused = RateLimited if full else InvalidRequest if (account, rid) in self.live else None
        submission = Submission(tokens, SamplingParams(n=n), rid=rid, account=account)
        with pytest.raises(refused) if refused else nullcontext():
            self.frontend.submit(self.frontend.inputs.encode(submission), client)
        if refused is None:
            rids = [message.rid for message in self.sent[before:] if isinstance(message, AddRequest)]
            self.live[account, rid], self.waiting[rids[0]] = (client, rids), (account, len(tokens))

    @rule(data=st.data(), ends=st.booleans())
    def answer(self, data, ends):
        """A token of a live completion, or of any that there ever was."""
        rids = self.of("a") + self.of("b")
        if not rids or data.draw(st.booleans()):
            rids = [message.rid for message in self.sent if isinstance(message, AddRequest)]
        rid = data.draw(st.sampled_from(rids)) if rids else "never"
        self.frontend.take([TokenEvent(rid, [5], Finish("stop") if ends else None)])
        self.waiting.pop(rid, None)
        if ends:
            self.forget(rid)

    @rule(client=clients)
    def leave(self, client):
        before = len(self.sent)
        client.close()
        gone = [rid for whose, rids in self.live.values() if whose is client for rid in rids]
        aborted = [message.rid for message in self.sent[before:]]
        assert sorted(aborted) == sorted(gone), "all of its own, and nothing else"
        for rid in gone:
            self.forget(rid)

    @invariant()
    def counts(self):
        assert self.frontend.num_open == len(self.of("a")) + len(self.of("b"))
        assert self.frontend._by_submission == {key: set(rids) for key, (_, rids) in self.live.items()}
        for account in ("a", "b"):
            queued = sum(size for whose, size in self.waiting.values() if whose == account)
            limits = self.frontend._admission
            assert (limits.open[account], limits.waiting_tokens[account]) == (len(self.of(account)), queued)


def test_lives_of_ids(tokenizer):
    Lives.tokenizer = tokenizer
    run_state_machine_as_test(Lives, settings=settings(max_examples=80, stateful_step_count=25, deadline=None))

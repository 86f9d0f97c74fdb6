"""The tokenizer against transformers' own over the same directory, and chat templates."""

import io
import json
import signal

import pytest
from transformers import AutoTokenizer

from runtime.errors import InvalidRequest, ModelError, Overloaded, RametError
from runtime.models import template_program, templates
from runtime.models.process_pool import ProcessPool
from runtime.models.tokenizer import Detokenizer, Offsets, Tokenizer


def test_each_token_has_its_end(tokenizer):
    text = "Many stems grow from one shared root."
    ids = tokenizer.encode(text)
    ends = [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]
    assert tokenizer.encode_with_ends(text) == (ids, ends)


TEXTS = [
    "Hello, world!",
    "def f(x):\n\treturn x ** 2  # 12345",
    "  leading and   many   spaces ",
    "Grüße aus Zürich, 日本語, русский, العربية",
    "🌱🌳👩‍👩‍👧‍👦 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|>user\nhi<|im_end|>\n" * 900,
    "1234567890 3.14159 0x1F",
    "",
    "\n\n\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_transformers(tokenizer, default_model_dir, text):
    theirs = AutoTokenizer.from_pretrained(default_model_dir)
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_known_ids_of_the_published_tokenizer(tokenizer):
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.encode("12") == [33, 34], "digits stand alone"
    assert (tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")) == (0, 2)
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.vocab_size == 49152


def test_chat_template_equals_transformers(tokenizer, default_model_dir):
    theirs = AutoTokenizer.from_pretrained(default_model_dir)
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}],
    ):
        for prompt in (True, False):
            assert tokenizer.apply_chat_template(messages, prompt) == theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )


@pytest.fixture
def with_template(default_model_dir, tmp_path):
    def make(template):
        path = tmp_path / "t.jinja"
        path.write_text(template)
        return Tokenizer.load(default_model_dir, path)

    return make


def test_a_template_that_is_none_ends_the_start(with_template):
    with pytest.raises(ModelError, match=r"--chat-template .*: the model's chat template cannot be read"):
        with_template("{% for m in messages %}")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
FOREVER = LOOP.replace("{", "{{").replace("}", "}}") + "{}{{% endfor %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (FOREVER.format("{% set c = a + b %}"), "too long"),
        (FOREVER.format("{{ messages[0].role }}"), "too long"),
        (FOREVER.format(""), "too long"),
        ("{{ lipsum(n=10000000) }}", "too long|memory"),
        ("{{ 'x' * 10 ** 12 }}", "memory|too long"),
        ("{{ 10 ** 99999999 % 7 }}", "too long|read"),
        (
            "{% set n = messages | length + 9 %}{{ n ** 99 ** 99 ** 99 ** 99 ** 99 % 7 }}",
            "too long|memory",
        ),
        ("{{ messages | tojson(indent=2000000000) }}", "memory|too long"),
        (
            "{% set s = namespace(x='x') %}{% for _ in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
            "memory|too long",
        ),
        ("{{ '%2000000000d' | format(messages | length) }}", "memory|OverflowError|refuses"),
        ("{{ 'x' | center(90000000) }}", "characters|too long"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "refuses"),
        ("{% set _ = messages.append(1) %}", "refuses"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
    ],
)
def test_a_template_that_fails_is_a_client_error_reaches_nothing_and_ends(with_template, monkeypatch, template, words):
    monkeypatch.setattr(templates, "TEMPLATE_S", 2)
    with pytest.raises((InvalidRequest, ModelError), match=words):
        with_template(template).apply_chat_template([{"role": "user", "content": "x"}])
    assert with_template("{{ messages[0].role }}").apply_chat_template([{"role": "user"}]) == "user"


def test_a_template_or_token_that_is_no_text_ends_the_start(default_model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_text((default_model_dir / "tokenizer.json").read_text())
    for name in ("bos_token", "eos_token"):
        for value in (3, ["a"], {"content": 3}):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: value, f"add_{name}": True}))
            with pytest.raises(ModelError, match=f"{name} is no text"):
                Tokenizer.load(tmp_path)
    for template in (3, {"a": 1}, [{"name": "default", "template": 3}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(ModelError, match="chat_template is no text"):
            Tokenizer.load(tmp_path)


def test_a_rendering_process_ends_with_its_owner_and_another_follows(with_template):
    tokenizer, pool = with_template("{{ messages[0].role }}"), templates.PROCESSES
    assert tokenizer.apply_chat_template([{"role": "user"}]) == "user"
    for process in list(pool._all):
        process.kill()
        process.wait()
    assert tokenizer.apply_chat_template([{"role": "a"}]) == "a"
    (process,) = pool._all
    process.stdin.close()
    assert process.wait(60) == 0
    assert tokenizer.apply_chat_template([{"role": "b"}]) == "b"


def test_a_replacement_character_in_a_text_is_a_character(tokenizer):
    """Behind it, no place of a token moves, and it is shown at once."""
    text = "a \ufffd b\ufffd\ufffd🌱 c"
    ids, detokenizer, offsets = tokenizer.encode(text, False), Detokenizer(tokenizer), Offsets(tokenizer)
    shown, places = 0, []
    for token in ids:
        places.append((offsets.push(token), shown))
        shown += len(detokenizer.push([token]))
    assert shown == len(text)
    assert all(place == before for place, before in places)
    ends = [tokenizer.decode(ids[: i + 1], False) for i in range(len(ids))]
    whole = [i for i, end in enumerate(ends) if text.startswith(end) and tokenizer.encode(end, False) == ids[: i + 1]]
    assert len(whole) > 6
    assert [places[i + 1][0] for i in whole[:-1]] == [len(ends[i]) for i in whole[:-1]]


def test_a_stopped_rendering_process_is_replaced(with_template):
    tokenizer, pool = with_template("{{ messages[0].role }}"), templates.PROCESSES
    assert tokenizer.apply_chat_template([{"role": "a"}]) == "a"
    for process in list(pool._all):
        process.send_signal(signal.SIGSTOP)
    assert tokenizer.apply_chat_template([{"role": "b"}]) == "b"


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_stopped_at_its_work_is_replaced(tmp_path, times):
    program = f"""
import os, signal, sys
print(flush=True)
for line in sys.stdin:
    if len(os.listdir({str(tmp_path)!r})) < {times}:
        open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w")
        os.kill(os.getpid(), signal.SIGSTOP)
    print("done", flush=True)
"""
    pool = ProcessPool("try", ["-c", program], lambda answers: answers.readline())

    def write(requests):
        requests.write(b"x\n")
        requests.flush()

    if times == 1:
        assert pool.ask(write, 600) == b"done\n"
    else:
        with pytest.raises(Overloaded, match="stopped"):
            pool.ask(write, 600)
    pool.close()


def test_what_published_templates_use(with_template):
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ eos_token }}{{ strftime_now('%Y') | length }}"
    )
    text = tokenizer.apply_chat_template([{"role": "skip"}, {"role": "user", "content": "<é>"}])
    assert text == json.dumps({"role": "user", "content": "<é>"}, ensure_ascii=False) + "<|im_end|>4"


def test_a_crash_within_the_library_is_an_error_of_the_one_request(tokenizer, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 raises it."""

    class Crashing:
        def encode_batch_fast(self, *args, **options):
            raise PanicException("index out of bounds at /a/path")

    monkeypatch.setattr(tokenizer, "_fast", Crashing())
    with pytest.raises(RametError) as error:
        tokenizer.encode("x")
    assert "path" not in error.value.message


def test_no_template_and_no_tokenizer(default_model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_text((default_model_dir / "tokenizer.json").read_text())
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.load(tmp_path).apply_chat_template([])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_bos_is_added_where_the_config_asks_for_it(default_model_dir, tmp_path):
    fast = json.loads((default_model_dir / "tokenizer.json").read_text())
    fast["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(fast))
    config = {"bos_token": "<|im_start|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_batches_and_somebody_elses_limits(default_model_dir, tmp_path):
    fast = json.loads((default_model_dir / "tokenizer.json").read_text())
    fast["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    fast["padding"] = padding | {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|im_end|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fast))
    ours, plain = Tokenizer.load(tmp_path), Tokenizer.load(default_model_dir)
    assert ours.encode(TEXTS[1]) == plain.encode(TEXTS[1])


def test_more_of_what_published_templates_use(with_template):
    messages = [{"role": "user", "content": "é"}]
    tokenizer = with_template("{% generation %}{{ messages[0].content }}{% endgeneration %}{{ thinking }}")
    assert tokenizer.apply_chat_template(messages, variables={"thinking": True}) == "éTrue"
    tokenizer = with_template("{{ messages | tojson(ensure_ascii=True, indent=2) }}{{ sep_token is defined }}")
    assert tokenizer.apply_chat_template(messages) == json.dumps(messages, indent=2) + "False"
    tokenizer = with_template("{{ documents is defined and documents is none and tools is none }}")
    assert tokenizer.apply_chat_template(messages) == "True"


def test_a_list_of_templates_and_a_template_file(default_model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_text((default_model_dir / "tokenizer.json").read_text())
    templates = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == "F"
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages | length }}")
    assert Tokenizer.load(tmp_path, own).apply_chat_template([]) == "0"
    for mistake, said in ((b"{{ broken", "unexpected end of template"), (b"\xff", "not UTF-8")):
        own.write_bytes(mistake)
        with pytest.raises(ModelError, match=rf"--chat-template .*own\.jinja.*{said}"):
            Tokenizer.load(tmp_path, own)


def test_a_prompt_that_ends_early_is_none():
    """Its process was killed while it wrote."""
    file = io.BytesIO()
    template_program.write_frame(file, b"a prompt")
    assert template_program.read_frame(io.BytesIO(file.getvalue())) == b"a prompt"
    assert template_program.read_frame(io.BytesIO(file.getvalue()[:-1])) == b""

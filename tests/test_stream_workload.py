"""Prompts of known length, request bodies, and where prompts come from."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfbook.errors import BadInput
from perfbook.stream.client import Endpoint
from perfbook.stream.promptfile import read_prompts
from perfbook.stream.tokenizers import LocalTokenizer, ServerTokenizer
from perfbook.stream.workload import Prompt, RequestShape, draw_lengths, exact_prompts, fixed_prompts

CHAT = Endpoint("http://h:1", "m")
PLAIN = Endpoint("http://h:1", "m", kind="completions")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    """A real byte-pair tokenizer, small and trained here, in which many words are several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    from perfbook.stream.words import WORDS

    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 1000])
def test_lengths_are_exact(model_dir, tokens: int):
    counter = LocalTokenizer(model_dir)
    prompts = exact_prompts(model_dir, tokens, 5, seed=1)
    assert [counter.count(p.text) for p in prompts] == [tokens] * 5
    assert all(p.exact and p.tokens_asked == tokens for p in prompts)


def test_prompts_differ_from_the_first_block_on_and_between_seeds(model_dir):
    first = exact_prompts(model_dir, 64, 50, seed=1)
    second = exact_prompts(model_dir, 64, 50, seed=2)
    starts = [p.text.split(" ")[:4] for p in [*first, *second]]
    assert len({tuple(s) for s in starts}) == 100
    assert exact_prompts(model_dir, 64, 50, seed=1) == first


def test_without_a_tokenizer_lengths_are_words_and_said_to_be_approximate():
    (prompt,) = exact_prompts(None, 20, 1, seed=1)
    assert len(prompt.text.split()) == 20
    assert (prompt.exact, prompt.tokens_asked) == (False, 20)


def test_one_length_per_prompt(model_dir):
    lengths = draw_lengths({"uniform": [5, 40]}, 6, seed=4)
    counter = LocalTokenizer(model_dir)
    assert [counter.count(p.text) for p in exact_prompts(model_dir, lengths, 6, seed=1)] == lengths


@settings(max_examples=50)
@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 1000))
def test_drawn_lengths_stay_in_range(low: int, more: int, seed: int):
    drawn = draw_lengths({"uniform": [low, low + more]}, 20, seed)
    assert all(low <= n <= low + more for n in drawn)
    assert drawn == draw_lengths({"uniform": [low, low + more]}, 20, seed)
    assert all(n >= 1 for n in draw_lengths({"lognormal": [low, 2.0]}, 20, seed))
    assert draw_lengths(low, 3, seed) == [low] * 3


@pytest.mark.parametrize("spec", [{}, {"uniform": [5, 1]}, {"normal": [1, 2]}, {"uniform": [1]}, {"lognormal": [0, 1]}])
def test_unknown_lengths_are_refused(spec):
    with pytest.raises(BadInput):
        draw_lengths(spec, 3, 0)


def test_a_path_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput) as raised:
        exact_prompts(tmp_path, 5, 1, 0)
    assert "\n" not in str(raised.value)


def test_a_server_without_tokenize_has_no_tokenizer():
    assert ServerTokenizer.find(Endpoint("http://127.0.0.1:9", "m")) is None


def test_bodies():
    shape = RequestShape(8, min_tokens=4, ignore_eos=True, extra_body={"top_p": 0.5, "seed": 7})
    chat = json.loads(shape.body(CHAT, Prompt(text="hi")))
    assert chat == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0.0,
        "min_tokens": 4, "ignore_eos": True, "stream": True, "top_p": 0.5, "seed": 7,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    plain = json.loads(shape.ladder()[1][0].body(PLAIN, Prompt(text="hi", output_tokens=2)))
    assert (plain["prompt"], plain["max_tokens"], plain["min_tokens"]) == ("hi", 2, 2)
    assert plain["stream_options"] == {"include_usage": True}
    assert "stream" not in json.loads(
        shape.body(CHAT, Prompt(messages=({"role": "user", "content": "x"},)), stream=False)
    )
    last, without = shape.ladder()[-1]
    assert without == "stream_options.continuous_usage_stats, ignore_eos and min_tokens"
    assert set(json.loads(last.body(CHAT, Prompt(text="hi")))) == {
        "model", "messages", "max_tokens", "temperature", "stream", "stream_options", "top_p", "seed",
    }  # fmt: skip
    with pytest.raises(BadInput):
        shape.body(PLAIN, Prompt(messages=()))


@pytest.mark.parametrize("bad", [{"output_tokens": 0}, {"output_tokens": 4, "min_tokens": 5}])
def test_impossible_shapes_are_refused(bad):
    with pytest.raises(BadInput):
        RequestShape(**bad)


def test_prompt_files(tmp_path):
    lines = tmp_path / "p.jsonl"
    lines.write_text(
        '{"prompt": "a", "output_tokens": 9}\n\n{"messages": [{"role": "user", "content": "b"}]}\n'
        '{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "c\u2028d"}]}\n'
        '{"conversations": [{"from": "gpt", "value": "e"}]}\n{"text": "f"}\n'
    )
    assert read_prompts(lines) == [
        Prompt(text="a", output_tokens=9),
        Prompt(messages=({"role": "user", "content": "b"},)),
        Prompt(text="c\u2028d"),
        Prompt(text="f"),
    ]
    assert len(read_prompts(lines, limit=2)) == 2
    array = tmp_path / "p.json"
    array.write_text('[\n {"conversations": [{"from": "human", "value": "x"}]}\n]')
    assert read_prompts(array) == [Prompt(text="x")]


@pytest.mark.parametrize(
    ("content", "says"), [("{", "line 1"), ("7", "needs prompt"), ('{"q": 1}', "needs prompt"), ("", "holds no prompt")]
)
def test_bad_prompt_files_are_refused_with_their_place(tmp_path, content: str, says: str):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match=says):
        read_prompts(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_prompts(tmp_path / "none")


def test_fixed_prompts_are_the_same():
    assert all(a == b for a, b in pairwise(fixed_prompts("x", 3)))

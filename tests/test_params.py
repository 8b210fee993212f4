"""Parameter files: what is accepted, and the one line that each mistake gets."""

import re
from pathlib import Path

import pytest

from perfbook.errors import BadInput
from perfbook.params import Variant, load_variant, make_variant
from perfbook.yamlfile import nearest

GOOD = """\
variant: demo
server:
  model: /models/demo
  args:
    max-model-len: 2048
  env:
    A: 1
sweep:
  concurrency: [1, 2]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(BadInput) as error:
        load_variant(write(tmp_path, text), overrides)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_a_file_becomes_a_variant(tmp_path: Path) -> None:
    variant = load_variant(write(tmp_path, GOOD))
    assert variant.server.args == {"max-model-len": 2048}
    assert variant.server.env == {"A": "1"}
    assert variant.server.name == "demo"
    assert variant.sweep.concurrency == [1, 2]
    assert variant.single_stream.output_tokens == [128, 512]


def test_sections_round_trip() -> None:
    variant = make_variant({"variant": "x", "server": {"model": "m"}}, "here")
    assert make_variant(variant.sections(), "there") == variant


def test_set_overrides_and_is_validated(tmp_path: Path) -> None:
    overrides = ["server.args.swap-space=4", "sweep.concurrency=[1,8]", "workload.prompt=a=b"]
    variant = load_variant(write(tmp_path, GOOD), overrides)
    assert variant.server.args == {"max-model-len": 2048, "swap-space": 4}
    assert variant.sweep.concurrency == [1, 8]
    assert variant.workload.prompt == "a=b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD + "swep: {}\n",
            "demo.yaml:10: unknown key 'swep'; did you mean 'sweep'?",
        ),
        (
            GOOD.replace("concurrency", "concurency"),
            "demo.yaml:9: unknown key 'sweep.concurency'; did you mean 'concurrency'?",
        ),
        (
            GOOD.replace("[1, 2]", "[4, 2]"),
            "demo.yaml:8: sweep: concurrency must ascend without repeats",
        ),
        (
            GOOD.replace("[1, 2]", "[0, 2]"),
            "demo.yaml:9: sweep.concurrency.0 = '0': should be greater than or equal to 1",
        ),
        (
            GOOD.replace("[1, 2]", "[1.5]"),
            "demo.yaml:9: sweep.concurrency.0 = '1.5': should be a valid integer",
        ),
        (GOOD.replace("variant: demo\n", ""), "demo.yaml: 'variant' is missing"),
        (
            GOOD.replace("variant: demo", "variant: ../up"),
            "demo.yaml:1: variant = '../up': should be a plain name: letters and digits, no blanks or slashes",
        ),
        (
            "variant: v\nserver: {}\n",
            "demo.yaml:2: server: give either model (perfbook starts the server) or base_url (attach to one)",
        ),
        (
            "variant: v\nserver:\n  base_url: localhost:8000\n",
            "demo.yaml:2: server: base_url 'localhost:8000' is not a http:// or https:// address "
            "such as http://gpu-box:8000/v1",
        ),
        (
            "variant: v\nserver:\n  base_url: http://h:99999\n",
            "demo.yaml:2: server: base_url 'http://h:99999' is not a http:// or https:// address: "
            "Port out of range 0-65535",
        ),
        (
            "variant: v\nserver:\n  base_url: 'http://[::1'\n",
            "demo.yaml:2: server: base_url 'http://[::1' is not a http:// or https:// address: Invalid IPv6 URL",
        ),
        *(
            (
                f"variant: v\nserver:\n  base_url: '{odd}'\n",
                f"demo.yaml:2: server: base_url {odd!r} is not a http:// or https:// address such as "
                "http://gpu-box:8000/v1",
            )
            for odd in (
                "http://h:0",
                "http://my box:8000",
                "http://h:8000/v1?key=1",
                "http://h#v1",
                "https://",
                "ftp://h",
            )
        ),
        (
            "variant: v\nserver:\n  base_url: http://me:secret@h:99999/\n",
            "demo.yaml:2: server: base_url carries credentials; put the key in a variable and name it in api_key_env",
        ),
        (
            "variant: v\nserver:\n  base_url: http://me:secret@h/\n",
            "demo.yaml:2: server: base_url carries credentials; put the key in a variable and name it in api_key_env",
        ),
        (
            GOOD.replace("A: 1", "HF_TOKEN: hf_abc"),
            "demo.yaml:2: server: HF_TOKEN looks like a secret; export it before you start (the server inherits it), "
            "and leave it out of the file",
        ),
        (
            GOOD.replace("max-model-len: 2048", "api-key: hf_abc"),
            "demo.yaml:2: server: api-key looks like a secret; export it before you start (the server inherits it), "
            "and leave it out of the file",
        ),
        (GOOD + "variant: again\n", "demo.yaml:10: 'variant' stands twice (first in line 1)"),
        (GOOD + "targets: {ttft_ms: .nan}\n", "demo.yaml:10: targets.ttft_ms is nan; use null for unknown"),
        (
            GOOD + "tuning: {when: 2026-01-01}\n",
            "demo.yaml:10: tuning.when was read as a date; put it in quotes",
        ),
        (GOOD + "tuning: {1: a}\n", "demo.yaml:10: key 1 is not text; put it in quotes"),
        ("variant: [\n", "demo.yaml:2: not valid YAML (expected the node content, but found '<stream end>')"),
        (
            GOOD + "targets:\n",
            "demo.yaml:10: targets = 'None': should be keys with values; leave it out for the defaults",
        ),
        (GOOD + 'on_end: ["a\\0b"]\n', "demo.yaml:10: 'on_end.0' holds the character U+0000; remove it"),
        (
            GOOD + 'workload: {prompt: "\\uD83D"}\n',
            "demo.yaml:10: 'workload.prompt' holds the character U+D83D; remove it",
        ),
        (GOOD.replace("A: 1", '"A=B": 1'), "demo.yaml:7: server.env.A=B = 'A=B': no variable can have this name"),
        ("a: &a {b: *a}\n", "demo.yaml: nested too deeply, or within itself"),
        (
            "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
            "demo.yaml: more than 50000 values, aliases (*name) counted each time",
        ),
        ("#" * 300_000, "demo.yaml: larger than 256 KiB; is this a parameter file?"),
        ("- a\n", "demo.yaml: holds list, not keys with values; start from params/template.yaml"),
        ("", "demo.yaml: holds NoneType, not keys with values; start from params/template.yaml"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, text) == message


def test_a_secret_in_the_url_is_not_repeated(tmp_path: Path) -> None:
    text = "variant: v\nserver:\n  base_url: http://me:hunter2@h/\n"
    assert "hunter2" not in refused(tmp_path, text)


@pytest.mark.parametrize("override", ["sweep", "=1", "sweep..a=1", "variant.x=1"])
def test_a_bad_set_names_itself(tmp_path: Path, override: str) -> None:
    assert override in refused(tmp_path, GOOD, override)


def test_set_of_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    assert refused(tmp_path, GOOD, "sweep.repeat=2") == (
        "demo.yaml:8: unknown key 'sweep.repeat'; did you mean 'repeats'?"
    )


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_variant(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="Is a directory"):
        load_variant(tmp_path)
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"variant: \xff\n")
    with pytest.raises(BadInput, match=re.escape("not UTF-8 text (byte 9)")):
        load_variant(path)


def test_nearest_word() -> None:
    assert nearest("max_model_length", ["max-model-len", "max-num-seqs"]) == "max-model-len"
    assert nearest("zzz", ["max-model-len"]) is None


def test_every_key_has_a_description() -> None:
    for name, field in Variant.model_fields.items():
        section = field.annotation
        if hasattr(section, "model_fields"):
            for key, inner in section.model_fields.items():
                assert inner.description, f"{name}.{key} is not described"

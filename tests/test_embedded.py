"""The embedded model: converted once, whole or not at all, whoever asks and however often."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfbook.errors import BadInput, PerfbookError
from perfbook.server import embedded

MODEL = "embedded:smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package with a model file that nobody has to install."""
    package = tmp_path / "packages" / "carries_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('never imported')")
    (package / "model.gguf").write_bytes(b"not a model")
    monkeypatch.syspath_prepend(package.parent)
    source = embedded.Embedded("carries_a_model", "carries-a-model==1.0", "model.gguf")
    monkeypatch.setitem(embedded.EMBEDDED, "smollm2-135m-instruct", source)
    monkeypatch.setenv("PERFBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def conversion(monkeypatch: pytest.MonkeyPatch, run: Callable[[Path], None]) -> list[str]:
    """Put ``run`` in the place of the 20 s of transformers; the list tells which file it was given."""
    asked: list[str] = []

    def instead(gguf: Path, target: Path) -> None:
        asked.append(gguf.name)
        run(target)

    monkeypatch.setattr(embedded, "_run_conversion", instead)
    return asked


def whole(target: Path) -> None:
    target.mkdir()
    for name in embedded.CHECKPOINT_FILES:
        (target / name).write_text(name)


@pytest.mark.parametrize("model", ["/models/kimi", "moonshotai/Kimi-K2.5", "./here", "embedded"])
def test_other_models_pass_unchanged(model: str) -> None:
    assert embedded.resolve_model(model) == model


def test_unknown_name_is_refused_with_the_known_one() -> None:
    with pytest.raises(BadInput) as caught:
        embedded.resolve_model("embedded:llama-7b")
    assert str(caught.value) == (
        "server.model: nothing embedded is called 'llama-7b'; there is embedded:smollm2-135m-instruct"
    )


def test_missing_package_is_named_with_the_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = embedded.Embedded("no_such_package_here", "no-such-package==1.0", "m.gguf")
    monkeypatch.setitem(embedded.EMBEDDED, "smollm2-135m-instruct", source)
    with pytest.raises(BadInput) as caught:
        embedded.resolve_model(MODEL)
    assert str(caught.value) == (
        "server.model: m.gguf comes with the package no-such-package==1.0, which is not installed; run `make setup`"
    )
    assert not cache.exists()


def test_converts_once_and_says_so_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = conversion(monkeypatch, whole)
    said: list[str] = []
    first = embedded.resolve_model(MODEL, said.append)
    second = embedded.resolve_model(MODEL, said.append)
    assert first == second == str(cache / "smollm2-135m-instruct")
    assert asked == ["model.gguf"]
    assert said == ["converting model.gguf to a checkpoint (once, about 20 s)"]


def test_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise PerfbookError("converting failed")

    conversion(monkeypatch, half)
    with pytest.raises(PerfbookError, match="converting failed"):
        embedded.resolve_model(MODEL)
    assert [path.name for path in cache.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_remains_of_a_killed_conversion_are_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = cache / ".smollm2-135m-instruct.partial"
    folder = cache / "smollm2-135m-instruct"
    for remains in (partial, folder):
        remains.mkdir(parents=True)
        (remains / "config.json").write_text("half")
    conversion(monkeypatch, whole)
    embedded.resolve_model(MODEL)
    assert sorted(path.name for path in folder.iterdir()) == sorted(embedded.CHECKPOINT_FILES)
    assert (folder / "config.json").read_text() == "config.json"
    assert not partial.exists()


def test_two_at_once_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converting, go_on = threading.Event(), threading.Event()

    def slow(target: Path) -> None:
        converting.set()
        assert go_on.wait(10)
        whole(target)

    asked = conversion(monkeypatch, slow)
    said: list[str] = []

    def waiting(line: str) -> None:
        said.append(line)
        go_on.set()

    answers: list[str] = []
    first = threading.Thread(target=lambda: answers.append(embedded.resolve_model(MODEL)))
    first.start()
    assert converting.wait(10)
    answers.append(embedded.resolve_model(MODEL, waiting))
    first.join(10)
    assert answers == [str(cache / "smollm2-135m-instruct")] * 2
    assert asked == ["model.gguf"]
    assert said == ["another process is converting the model; waiting for it"]


def test_full_disk_is_noticed_before(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = conversion(monkeypatch, whole)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=123_000_000))
    with pytest.raises(PerfbookError, match=r": 123 MB free, converting the model needs 400 MB; free some or set"):
        embedded.resolve_model(MODEL)
    assert asked == []


def test_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(PerfbookError, match=r"cannot be written \(.*\); set PERFBOOK_CACHE to a folder that can$"):
        embedded.resolve_model(MODEL)


@pytest.mark.long  # imports torch and transformers in a process of its own
def test_broken_model_file_gives_one_line(cache: Path) -> None:
    with pytest.raises(PerfbookError) as caught:
        embedded.resolve_model(MODEL)
    assert str(caught.value).startswith("converting model.gguf failed: ")
    assert "\n" not in str(caught.value)
    assert not (cache / "smollm2-135m-instruct").exists()


def test_the_real_model_is_a_plain_bfloat16_checkpoint() -> None:
    """Reads what `make setup` converted; converts it now where that has not happened."""
    done = subprocess.run(
        [sys.executable, "-m", "perfbook.server.embedded"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    shape = ("architectures", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in shape] == [["LlamaForCausalLM"], 30, 576, 9, 3]
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    assert {tensor["dtype"] for tensor in tensors} == {"BF16"}
    assert max(tensor["data_offsets"][1] for tensor in tensors) == 2 * 134_515_008  # 2 bytes × parameters
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()

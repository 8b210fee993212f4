"""A run's folder under ``outputs/<variant>/<run>/``: find it, start it, append to it.

Records are only ever appended. Executing a notebook again opens a new *attempt*; what a reader sees is the latest
attempt of each notebook, and within it the latest record of each (kind, key), so that a cell can be re-run safely.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfbook import paths
from perfbook.errors import BadInput, OutOfOrder
from perfbook.masking import mask
from perfbook.params import Variant, make_variant
from perfbook.record import jsonl

SCHEMA = 1
ATTEMPT = "attempt"
LATEST, LATEST_REHEARSAL = "latest", "latest-rehearsal"


def now_utc() -> str:
    """Wall-clock time for people, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Run:
    """One run's folder."""

    path: Path

    @classmethod
    def start(cls, variant: Variant, *, rehearsed: bool = False) -> Run:
        """Create the folder, write its parameters (of a rehearsal its law too), and point ``latest`` at it.

        A rehearsal gets a pointer of its own, ``latest-rehearsal``: nobody goes on measuring in one by mistake.
        """
        parent = paths.outputs() / variant.variant
        parent.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        for attempt in range(1000):
            path = parent / (stamp if attempt == 0 else f"{stamp}-{attempt:03d}")
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue
        run = cls(path)
        for folder in ("notebooks", "figures", "traces"):
            (path / folder).mkdir()
        if rehearsed:
            jsonl.write_atomically(run.law_path, json.dumps(variant.rehearsal, indent=1, ensure_ascii=False) + "\n")
        run.write_header({"schema": SCHEMA, "started": now_utc(), "rehearsed": rehearsed}, variant)
        run.point()
        return run

    @classmethod
    def latest(cls, variant_name: str, *, rehearsed: bool = False) -> Run | None:
        """The newest run of a variant, of those that were measured or of those that were rehearsed; or None."""
        parent = paths.outputs() / variant_name
        found = sorted(path.parent for path in parent.glob("*/run.json") if not path.parent.is_symlink())
        return next((run for run in map(cls, reversed(found)) if run.rehearsed is rehearsed), None)

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """An existing run, by its folder (``outputs/<variant>/latest`` too) or by a variant's name.

        A name stands for the variant's latest measured run, and for its latest rehearsal where nothing was measured.
        """
        folder, inside = Path(path), paths.outputs() / str(path)
        for candidate in (folder, inside, inside / LATEST, inside / LATEST_REHEARSAL):
            if (candidate / "run.json").is_file():
                folder = candidate
                break
        if not (folder / "run.json").is_file():
            raise BadInput(f"{path}: not a run's folder (no run.json); runs lie under outputs/<variant>/")
        return cls(folder.resolve())

    @classmethod
    def every(cls) -> list[Run]:
        """All runs of all variants, oldest first."""
        found = [path.parent for path in paths.outputs().glob("*/*/run.json") if not path.parent.is_symlink()]
        return [cls(path) for path in sorted(found, key=lambda path: path.name)]

    @property
    def header(self) -> dict[str, Any]:
        """``run.json``: provenance and effective parameters."""
        try:
            value = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.path / 'run.json'}: cannot be read ({error})") from None
        if not isinstance(value, dict):
            raise BadInput(f"{self.path / 'run.json'}: not a JSON object")
        return value

    @property
    def name(self) -> str:
        """``<variant>/<run>``."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def rehearsed(self) -> bool:
        """Whether the numbers come from the stand-in."""
        return bool(self.header.get("rehearsed"))

    @property
    def law_path(self) -> Path:
        """The law that the stand-in of a rehearsal obeys: fixed when the run starts, for every launch."""
        return self.path / "law.json"

    @property
    def variant(self) -> Variant:
        """The parameters in force."""
        return make_variant(self.header["parameters"], str(self.path / "run.json"))

    def write_header(self, values: Mapping[str, Any], variant: Variant | None = None) -> None:
        """Merge values into ``run.json``; parameters are replaced when a variant is given."""
        header = self.header if (self.path / "run.json").exists() else {}
        header.update(values)
        if variant is not None:
            header["parameters"] = mask(variant.sections())
        jsonl.write_atomically(
            self.path / "run.json", json.dumps(jsonl.plain(header), indent=1, ensure_ascii=False) + "\n"
        )

    def point(self) -> None:
        """Make ``latest`` (of a rehearsal ``latest-rehearsal``) point at this run."""
        _point(self.path.parent / (LATEST_REHEARSAL if self.rehearsed else LATEST), self.path)

    def begin(self, notebook: str) -> None:
        """A notebook starts measuring: what its earlier attempts recorded is superseded."""
        self.append(notebook, ATTEMPT, {})

    def append(self, notebook: str, kind: str, values: Mapping[str, Any], *, key: str = "") -> str:
        """Append one record and return its id.

        Parameters
        ----------
        notebook : str
            Who measured, such as ``04_sweep``.
        kind : str
            What was measured, such as ``sweep_cell``.
        values : mapping
            Plain values with units in the keys.
        key : str
            Tells several records of a kind apart; a later record of the same key replaces the earlier in
            :meth:`records` (both stay in the file).
        """
        path = self.path / "records.jsonl"
        record_id = f"r{jsonl.count_lines(path) + 1:05d}"
        jsonl.append(
            path,
            {
                "schema": SCHEMA,
                "id": record_id,
                "time": now_utc(),
                "notebook": notebook,
                "kind": kind,
                "key": key,
                **({"rehearsed": True} if self.rehearsed else {}),
                **values,
            },
        )
        return record_id

    def history(self) -> list[dict[str, Any]]:
        """Every record ever appended, superseded ones too."""
        return jsonl.read(self.path / "records.jsonl")

    def records(self, kind: str | None = None, *, notebook: str | None = None) -> list[dict[str, Any]]:
        """Records in force, in the order measured: latest attempt, latest of each key."""
        current: dict[tuple[str, str, str], dict[str, Any]] = {}
        for record in self.history():
            slot = (record.get("notebook", ""), record.get("kind", ""), record.get("key", ""))
            if not all(isinstance(part, str) for part in slot):
                continue  # nothing of ours: somebody edited the file
            who = slot[0]
            if record.get("kind") == ATTEMPT:
                current = {key: value for key, value in current.items() if key[0] != who}
                continue
            current.pop(slot, None)
            current[slot] = record
        return [
            record for (who, what, _), record in current.items() if kind in (None, what) and notebook in (None, who)
        ]

    def record(self, kind: str) -> dict[str, Any] | None:
        """The latest record of a kind, or None."""
        found = self.records(kind)
        return found[-1] if found else None

    def need(self, kind: str, notebook: str) -> dict[str, Any]:
        """The latest record of a kind; without one, the error names the notebook that makes it."""
        found = self.record(kind)
        if found is None:
            raise OutOfOrder(f"{self.name} has no {kind} record yet: run {notebook} first")
        return found


def _point(link: Path, path: Path) -> None:
    """Replace a symlink in one step."""
    temporary = link.with_name(f".{link.name}.{path.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name, target_is_directory=True)
    temporary.replace(link)

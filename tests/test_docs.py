"""Documentation that is written from the code stays what the code says."""

from perfbook import paths
from perfbook.params import Variant
from perfbook.reference import render


def test_parameter_reference_is_current() -> None:
    written = (paths.repository() / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert written == render(), "run: python -m perfbook.reference > docs/parameters.md"


def test_every_section_is_in_it() -> None:
    page = render()
    for name in Variant.model_fields:
        assert f"`{name}`" in page


def test_files_named_in_the_contributing_notes_exist() -> None:
    root = paths.repository()
    notes = (root / "CONTRIBUTING.md").read_text()
    for name in ("record/findings.toml", "server/log_rules.toml", "trace/kernels.toml", "server/retired.toml"):
        assert name in notes
        assert (root / "lib" / "perfbook" / name).is_file()

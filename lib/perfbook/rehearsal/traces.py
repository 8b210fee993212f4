"""temporary"""

from pathlib import Path
from collections.abc import Sequence
from perfbook.rehearsal.law import Law
from perfbook.rehearsal.engine import Step


def write_traces(law: Law, folder: Path, prefix: str, steps: Sequence[Step]) -> None:
    """temporary"""

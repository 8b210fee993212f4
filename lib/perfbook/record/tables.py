"""``requests.parquet`` and ``events.parquet``: one file each, one row group per measured cell.

Parquet cannot be appended to, so a new file is written beside the old one (its row groups copied as they are) and
renamed over it: a crash leaves the old file whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from perfbook.errors import BadInput

CELL = "cell"


def append_cell(path: Path, table: pa.Table) -> None:
    """Add a cell's rows; rows of the same cell that are already there are replaced.

    Parameters
    ----------
    path : Path
        The parquet file; created when missing.
    table : pyarrow.Table
        Rows of one cell; its ``cell`` column names it.
    """
    if table.num_rows == 0:
        return
    cell = table[CELL][0].as_py()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(temporary, table.schema, compression="zstd") as writer:
            if path.exists():
                old = pq.ParquetFile(path)
                for group in range(old.num_row_groups):
                    rows = old.read_row_group(group)
                    if rows.num_rows and rows[CELL][0].as_py() != cell:
                        writer.write_table(rows.cast(table.schema))
            writer.write_table(table)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> pa.Table:
    """All rows of a table file."""
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path}: cannot be read as parquet ({error})") from None

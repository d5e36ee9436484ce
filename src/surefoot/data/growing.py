"""A NumPy file whose array grows: what was appended is on the disk, and never in memory whole.

The format leaves room in its header for the number of rows, so the file is, byte for byte, what `numpy.save` writes of
the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np

from surefoot.system import durable


@contextmanager
def growing(path: Path, dtype: np.dtype, row: tuple[int, ...]) -> Iterator[Callable[[np.ndarray], None]]:
    """What appends rows to a new file in a folder that is being staged. dtype, row: of an element, and the shape of one
    row, () for a number."""
    count = 0
    with durable.filling(path) as file:

        def append(rows: np.ndarray) -> None:
            nonlocal count
            count += len(rows)
            durable.write_all(file, rows.astype(dtype, copy=False).tobytes())

        durable.write_all(file, _header(dtype, (0, *row)))
        yield append
        file.seek(0)
        durable.write_all(file, _header(dtype, (count, *row)))


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """As long for any number of rows."""
    header = BytesIO()
    described = np.lib.format.header_data_from_array_1_0(np.empty((0, *shape[1:]), dtype))
    np.lib.format.write_array_header_1_0(header, {**described, "shape": shape})
    return header.getvalue()

"""Bytes in words, everywhere in the same units: KiB, MiB, GiB, TiB, each 1,024 times the one before."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def size_text(size: int) -> str:
    """70.2 GiB, 320 MiB, 1.5 MiB, 12 KiB, 999 B; less than nothing keeps its sign."""
    if size < 0:
        return f"-{size_text(-size)}"
    for unit, factor in (("TiB", TIB), ("GiB", GIB)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    for unit, factor in (("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.0f} {unit}" if size >= 10 * factor else f"{size / factor:.1f} {unit}"
    return f"{size} B"

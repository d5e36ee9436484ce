"""What was known of a data file, or of several files together, before and while its records became examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Place = tuple[str, int, int]  # file, number of the record and line where it starts, both from 1


@dataclass(frozen=True)
class SourceFacts:
    """sha256: of the file. content: hash of all that decides which conversations its records are. layout, template: as
    used. rows: records of the file; used: the first so many of them. dropped: records that have no label left. unused:
    fields that nothing reads. notes: what a reader should know of the template. placeholders: records whose texts hold
    an unfilled {{name}}; placeholder: the first of these. part: where examples of the file went elsewhere. commit: of
    the hub data set that the file belongs to. template_fault: why it is not the template that was planned.
    unkept: why it is tokenised anew at every start; empty where it is not.
    example_prompt: something that a user could ask the trained model, from the records; empty where none is short."""

    file: str
    sha256: str
    content: str
    layout: str
    layout_reason: str
    template: str
    rows: int
    used: int
    dropped: tuple[Place, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    placeholders: tuple[Place, ...] = ()
    placeholder: str = ""
    part: str = ""
    commit: str | None = None
    template_fault: str = ""
    example_prompt: str = ""
    unkept: str = ""


def together(facts: Sequence[SourceFacts], name: str | None = None) -> SourceFacts:
    """The facts of several files as one. name: of the whole; None: all their names."""
    if len(facts) == 1:
        return facts[0]
    return SourceFacts(
        file=_listed(one.file for one in facts) if name is None else name,
        sha256=_hash(one.sha256 for one in facts),
        content=_hash(one.content for one in facts),
        layout=_listed(one.layout for one in facts),
        layout_reason=_listed(one.layout_reason for one in facts),
        template=_listed(one.template for one in facts),
        rows=sum(one.rows for one in facts),
        used=sum(one.used for one in facts),
        dropped=tuple(place for one in facts for place in one.dropped),
        unused=tuple(dict.fromkeys(field for one in facts for field in one.unused)),
        notes=tuple(dict.fromkeys(note for one in facts for note in one.notes)),
        placeholders=tuple(place for one in facts for place in one.placeholders),
        placeholder=next((one.placeholder for one in facts if one.placeholder), ""),
        part=_listed(one.part for one in facts if one.part),
        example_prompt=next((one.example_prompt for one in facts if one.example_prompt), ""),
        unkept=next((one.unkept for one in facts if one.unkept), ""),
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

"""What policies have to say besides their choice. All conflicts of a run are collected here and reported at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.system.errors import Fault


@dataclass
class Notes:
    """faults refuse the run; cautions are printed and the run goes on."""

    faults: list[Fault] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)

    def refuse(self, key: str, what: str, fix: str = "", code: str = "SF-CONFIG-CONFLICT") -> None:
        """key: the dotted config key that asks for the impossible. code: see `Fault`."""
        self.faults.append(Fault(key, what, fix, code))

    def caution(self, sentence: str) -> None:
        self.cautions.append(sentence)

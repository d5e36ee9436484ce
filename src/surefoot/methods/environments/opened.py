"""Open the environment that a config names.

    grpo:
      environment: tools.py:Calculator          # or MODULE:CLASS, entry_point:NAME, an address (see `openenv`)

A class of the user's own is called without arguments for every answer. The object's `reset(record)` is called once,
with the record of the prompt, and returns what is said before the first answer, or nothing; `step(answer)` is called
with the text of each turn. Both may return what `replies.reply_of` reads. A reset with a parameter `seed` gets one that
all answers to a prompt share; `close()` is called at the end where there is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from surefoot.config.methods import EnvironmentTerm
from surefoot.methods.environments.openenv import OpenEnvEpisode, find_fields
from surefoot.methods.environments.replies import ROLES, Reply, reply_of
from surefoot.methods.own_functions import identity, name_of, own_function
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import is_address
from surefoot.system.posting import server

_KEY = "grpo.environment.name"


class Episode(Protocol):
    """One conversation with an environment. It is called by one thread at a time."""

    def reset(self, record: Mapping[str, Any], seed: int) -> Reply: ...
    def step(self, answer: str) -> Reply: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Environment:
    """An environment.

    name: as the config has it.
    role: of the texts that it says.
    make: begins an episode.
    identity: by which a resumed run knows it again.
    """

    name: str
    role: str
    make: Callable[[], Episode]
    identity: str


def open_environment(term: EnvironmentTerm) -> Environment:
    """Raises InputError for a class that is not there or has no reset and step, or a server with other actions,
    EnvironmentFault for a server that does not answer."""
    name = term.name
    if is_address(name):
        asked = server(name, _KEY, timeout=term.seconds)
        fields = find_fields(asked, term.action, term.observation, _KEY.removesuffix(".name"))
        return Environment(name, ROLES[0], lambda: OpenEnvEpisode(asked, fields), f"OpenEnv {fields}")
    own = own_function(name, _KEY)
    for needed in ("reset", "step"):
        if isinstance(own, type) and not callable(getattr(own, needed, None)):
            what = f"{name_of(name)} has no method {needed}"
            raise InputError(Fault(_KEY, what, "docs/grpo.md shows an environment", code="SF-OWN-FUNCTION"))
    role = getattr(own, "role", ROLES[0])
    if role not in ROLES:
        what = f"{name_of(name)}.role is {role!r}, and must be {' or '.join(ROLES)}"
        raise InputError(Fault(_KEY, what, "", code="SF-OWN-FUNCTION"))
    return Environment(name, role, lambda: _PythonEpisode(own(), name, role), identity(name))


class _PythonEpisode:
    def __init__(self, own: Any, name: str, role: str):
        self._own, self._name, self._role = own, name, role

    def reset(self, record: Mapping[str, Any], seed: int) -> Reply:
        more = {"seed": seed} if "seed" in inspect.signature(self._own.reset).parameters else {}
        return reply_of(self._own.reset(dict(record), **more), self._role, self._name, opening=True)

    def step(self, answer: str) -> Reply:
        return reply_of(self._own.step(answer), self._role, self._name)

    def close(self) -> None:
        if callable(close := getattr(self._own, "close", None)):
            close()

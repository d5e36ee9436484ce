"""Environments on an OpenEnv server (meta-pytorch/OpenEnv, openenv-core 0.2 and later).

    grpo:
      environment: {name: "http://127.0.0.1:8000", action: message, observation: prompt}

An episode is a session of the server's WebSocket /ws, since its /reset and /step over HTTP make a new environment for
every request. {"type": "reset", "data"} begins it, with a seed and the record's fields, of which the server takes those
that the environment's reset has; {"type": "step", "data": action} is a turn. Both are answered by {"type":
"observation", "data": {"observation", "reward", "done"}} or by an error.

The action's field for the text and the observation's text are found in the server's /schema, unless they are named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.methods.environments.replies import Reply, reply_of
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.posting import Server
from surefoot.system.websocket import WebSocket


@dataclass(frozen=True)
class Fields:
    """What is used of a server's observations and actions.

    action: field that gets the text of a turn.
    observation: field that is the reply; None: the whole observation as JSON.
    schemas: SHA-256 of /schema, by which a resumed run notices another environment.
    """

    action: str
    observation: str | None
    schemas: str


def find_fields(server: Server, action: str | None, observation: str | None, key: str) -> Fields:
    """Complete the fields from the server's schemas. Raises InputError if the action has not one text to fill."""
    schemas = server.get("/schema")
    try:
        acts, sees = (dict(schemas[name]["properties"]) for name in ("action", "observation"))
    except (TypeError, KeyError, ValueError):
        what = "has no /schema with action and observation, as OpenEnv's servers do"
        fix = "is it an OpenEnv server, of openenv-core 0.2 or later?"
        raise EnvironmentFault(Fault(server.address, what, fix, code="SF-SERVER")) from None
    needed = schemas["action"].get("required", [])
    if action is None:
        texts = [name for name in needed if acts[name].get("type") == "string"]
        if len(texts) != 1 or len(needed) != 1:
            what = f"an action needs {', '.join(needed) or 'no field'}, and a turn is one text"
            raise InputError(Fault(f"{key}.action", what, f"name one of {', '.join(acts)}", code="SF-ENVIRONMENT"))
        action = str(texts[0])
    for part, name, known in (("action", action, acts), ("observation", observation, sees)):
        if name is not None and name not in known:
            what = f"the server's {part} has no field {name!r}"
            raise InputError(Fault(f"{key}.{part}", what, f"it has {', '.join(known)}", code="SF-ENVIRONMENT"))
    own = [name for name in sees if name not in ("done", "reward", "metadata")]
    if observation is None and len(own) == 1 and sees[own[0]].get("type") == "string":
        observation = own[0]
    return Fields(action, observation, hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest())


class OpenEnvEpisode:
    """One session."""

    def __init__(self, server: Server, fields: Fields):
        self._server, self._fields, self._socket = server, fields, WebSocket(server, "/ws")

    def reset(self, record: Mapping[str, Any], seed: int) -> Reply:
        return self._ask("reset", {"seed": seed, **record}, opening=True)

    def step(self, answer: str) -> Reply:
        return self._ask("step", {self._fields.action: answer}, opening=False)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, kind: str, data: Mapping[str, Any], *, opening: bool) -> Reply:
        said = self._socket.ask({"type": kind, "data": data})
        where = f"{self._server.address}/ws"
        try:
            found = said["data"]
            if said["type"] == "error":
                message = " ".join(str(found.get("message")).split())
                what = f"the environment answers {kind} with {found.get('code')}: {message}"
                raise EnvironmentFault(Fault(where, what, "see the server's log", code="SF-ENVIRONMENT"))
            seen, reward, done = dict(found["observation"]), found["reward"], bool(found["done"])
        except (TypeError, KeyError, ValueError, AttributeError):
            what = "answers without observation, reward and done, as OpenEnv's servers do"
            raise EnvironmentFault(Fault(where, what, "is it an OpenEnv server?", code="SF-SERVER")) from None
        name = self._fields.observation
        value = seen if name is None else seen.get(name)
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
        given = {
            "observation": text or (None if opening or done else ""),  # who says nothing and is not done goes on
            "reward": None if opening else reward,
            "done": done,
        }
        return reply_of(given, "user", where, opening=opening)

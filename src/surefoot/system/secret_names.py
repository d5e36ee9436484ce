"""Which names of settings, headers and environment variables hold a secret."""

from __future__ import annotations

import re

_OF_TEXT = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "image", "audio", "video", "stop", "next", "last")
_SECRET = re.compile(
    r"""
      secret(?!ar) | passw | passphrase | webhook | credential | authorization | private_?key
    | (?:api|access|account|auth|master|encryption|signing|storage|wandb|ssh|deploy|license|openai|session)
      _?key(?:_?id)?$
    | (?:^|_)(?:pwd|dsn|jwt|bearer|cookies?|o?auth|session_?id|connection_?string|conn_?str)$
    | (?:^|_)(?:db|database|user|my_?sql|pg|postgres|smtp|ftp|proxy|root|admin|login)_?pass$
    | _pat$ | amz_signature$
    | (?:hub|auth|access|hf|ms|om|user|git(?:hub)?|api|bearer)_?token$ | (?:^|_)token$
    """,
    re.VERBOSE,
)
_TOKEN_OF_TEXT = re.compile(rf"(?:{'|'.join(_OF_TEXT)})_token$")  # tokens that are no secret
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # of accessKey
_SHELLS = ("PWD", "OLDPWD")  # the folder that a shell is in


def hides(name: str) -> bool:
    """Whether a setting of this name holds a secret: a key, a password, an address that lets its owner in."""
    plain = _HUMP.sub("_", name).replace("-", "_").lower()
    return name not in _SHELLS and _SECRET.search(plain) is not None and _TOKEN_OF_TEXT.search(plain) is None


def hides_any(name: str) -> bool:
    """The same of a flag or a setting within settings: --hub-token, model.hub_token."""
    return hides(name.lstrip("-").rpartition(".")[2])

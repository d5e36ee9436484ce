"""Messages of libraries without what looks like a key or a password.

By shape, since nobody tells which text is secret. In doubt a harmless word goes: what is lost can be read in the
library's own log, and what was shown once stays in logs and bug reports.
"""

from __future__ import annotations

import re

_OF_TEXT = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "image", "stop")  # tokens that are no secret
_SECRET = re.compile(
    r"""
      (?<=://)[^/@\s]+(?=@)                                                              # user:password@host
    | (?:api[_-]?key|OF_TEXT token|secret|password|authorization)["']?\s*[=:]\s*["']?
      (?:(?:bearer|basic)\s+)?[^\s"'&,;]+                                                # token=…, Authorization: …
    | \bbearer\s+[\w.~+/=-]{8,}
    | \bbasic\s+(?=\S*[\d=])[\w+/=]{8,}
    | \beyJ[\w-]{8,}(?:\.[\w-]+)*                                                        # JSON web tokens
    | \b(?:hf_|sk-|gh[a-z]_|wandb_v\d+_)[\w-]{8,}
    | \b[0-9a-f]{32,}\b
    | \b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{32,}                                            # long, letters and digits
    """.replace("OF_TEXT", "".join(f"(?<!{kind}_)" for kind in _OF_TEXT)),
    re.VERBOSE | re.IGNORECASE,
)

_SECRET_NAME = re.compile(
    r"(?:hub|auth|access|hf|ms|om|user|git(?:hub)?|api|bearer)_?token$|^token$|api_?key$|secret|passw|webhook|credential"
    r"|private_?key|_TOKEN$",
    re.IGNORECASE,
)
_TOKENS_OF_TEXT = re.compile(rf"(?:{'|'.join(_OF_TEXT)})_token$", re.IGNORECASE)


def hides(name: str) -> bool:
    """Whether a setting of this name holds a secret: a key, a password, an address that lets its owner in."""
    return _SECRET_NAME.search(name) is not None and _TOKENS_OF_TEXT.search(name) is None


def redacted(text: str) -> str:
    """The text with an ellipsis for each secret."""
    return _SECRET.sub("…", text)

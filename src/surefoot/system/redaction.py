"""Remove what looks like a key or a password from messages of libraries.

    redacted(str(error))    # removes secrets, and anything that could be a key
    veiled(line)            # removes only certain secrets; hashes and long names stay

A secret is recognized by its format (`_SHAPES`) or by the name before it (`hides`). `redacted` may remove harmless
words, because a printed secret stays in logs and bug reports. Texts may be long and hostile, so every pattern runs in
linear time: it consumes what it reads, or its lookahead is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

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
_TOKEN_OF_TEXT = re.compile(rf"(?:{'|'.join(_OF_TEXT)})_token$")  # tokens that are not secrets
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # of accessKey
_SHELLS = ("PWD", "OLDPWD")  # the working folder of a shell
_SHAPES = re.compile(
    r"""
      (?<=://)(?:[^\s/:@"'<>]{0,256}:[^\s"'<>]{0,512}|[^/@\s]+)(?=@)                     # user:pass/w@rd@host
    | (?<=[?&])(?:[\w-]{0,40}[-_])?(?:sig|signature|key|auth|code)=[^\s"'&<>]+          # of a signed address
    | (?<=hooks\.slack\.com/services/)[\w/]+ | (?<=/api/webhooks/)[\w/-]+                # secret webhook addresses
    | -----BEGIN\ [A-Z ]{0,40}PRIVATE\ KEY(?:[^-]|-(?!----END))*+(?:-----END[A-Z ]{0,50}-----)?
    | \bbearer\s+[\w.~+/=-]{8,}
    | \bbasic\s+(?=[\w+/]{0,999}[\d=])[\w+/=]{8,}
    | \beyJ[\w-]{8,}(?:\.[\w-]+)*                                                        # JSON web tokens
    | \b(?-i:
        (?:hf_|sk-|gh[a-z]_|nvapi-|xai-|gsk_|r8_)(?![a-z_-]{1,60}(?![\w-]))[\w-]{8,}     # hf_hub_download is a word
      | (?:github_pat_|dckr_pat_|wandb_v\d{1,3}_|glpat-|gl[a-z]{1,6}t-|shp[a-z]{2}_|whsec_|do[a-z]_v1_)[\w-]{8,}
      | (?:lin_api_|p8e-|dnkey-|ops_eyJ|ATATT3|LTAI|AKCp|AGE-SECRET-KEY-)[\w-]{12,}
      | [rs]k_(?:live|test|prod)_\w{8,}
      | xox[a-z]-[\w-]{8,} | xapp-[\w-]{8,}                                              # Slack
      | (?:A3T|AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}                                             # AWS
      | AIza[\w-]{20,} | ya29\.[\w-]{8,} | GOCSPX-[\w-]{8,}                              # Google
      | npm_[A-Za-z0-9]{16,} | pypi-[\w-]{16,} | dapi[0-9a-f]{32}
      | SG\.[\w-]{16,}
      )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LONG = re.compile(
    r"""
      \b[0-9a-f]{32,}\b
    | (?<![\w-])(?=[a-z_-]*+\d)(?=[\d_-]*+[a-z])[\w-]{32,}                                # letters and digits
    """,
    re.VERBOSE | re.IGNORECASE,
)

# Whole names only, without backtracking into them: a line of megabytes would take hours.
_NAME = re.compile(r"""(?<![\w.-])([\w.-]++)\\{0,3}["']?\]?[^\S\n]*+(=>|:=|==?|:)[^\S\n]*+""")
_QUOTED = re.compile(r"""[bruf]{0,2}(\\{0,3}["'])((?:(?!\1)(?:\\.|.))*+)""", re.IGNORECASE)
_REST = re.compile(r"""[^\n"']++""")
_REST_OF_LINE = re.compile(r"[^\n]++")
_WORD = re.compile(r"""[^\s"']++""")
_NO_VALUE = re.compile(
    r"""["']?(?:<[^<>\s]{1,40}>|\$\{?\w{1,80}\}?|…)["']?$"""
)  # a special token, the name of a variable
# Words after `name:` in a sentence about it.
_PROSE = frozenset(
    [
        *("is", "are", "was", "were", "has", "must", "should", "may", "can", "cannot", "not", "no", "none", "null"),
        *("true", "false", "unset", "unknown", "missing", "invalid", "wrong", "expected", "error", "caution", "empty"),
        *("required", "unused", "given", "give", "set", "remove", "the", "a", "an", "this", "that", "it", "one"),
    ]
)
_HEADERS = re.compile(r"authorization$|cookies?$", re.IGNORECASE)  # their values have spaces
_OPENING = ("[", "{", "(")
_LONGEST = 20  # characters, beyond every word of _PROSE


def hides(name: str) -> bool:
    """Whether a setting of this name contains a secret: a key, a password, an address with credentials."""
    plain = _HUMP.sub("_", name).replace("-", "_").lower()
    return name not in _SHELLS and _SECRET.search(plain) is not None and _TOKEN_OF_TEXT.search(plain) is None


def hides_any(name: str) -> bool:
    """`hides` for a flag or a nested setting: --hub-token, model.hub_token."""
    return hides(name.lstrip("-").rpartition(".")[2])


def redacted(text: str) -> str:
    """Replace each secret, and anything that could be a key, by an ellipsis."""
    return _LONG.sub("…", veiled(text))


def veiled(text: str) -> str:
    """Remove only certain secrets: values after secrets' names (`NAME=value`, `name: value`, `"name": "value"`), and
    tokens by their format. Hashes and long names stay, because messages may be about them."""
    shown, position = [], 0
    # Values after names first: a match of a format within one would leave its rest.
    for start, end in _named_values(text):
        shown += text[position:start], "…"
        position = end
    return _SHAPES.sub("…", "".join([*shown, text[position:]]))


def veiled_line(text: str) -> str:
    """Remove values after secrets' names in a line of a file, up to its end, and keep its width."""
    for name in _NAME.finditer(text):
        if hides_any(name[1]) and text[name.end() :].strip():
            text = text[: name.end()] + _blank(text[name.end() :])
            break
    return _SHAPES.sub(lambda found: _blank(found[0]), text)


def veiled_words(words: Sequence[str]) -> list[str]:
    """Return a command without the values of flags with secrets' names."""
    shown: list[str] = []
    for word in words:
        before = shown[-1] if shown else ""
        hidden = before.startswith("-") and "=" not in before and not word.startswith("-") and hides_any(before)
        shown.append("…" if hidden else veiled(word))
    return shown


def veiled_value(value: Any) -> Any:
    """Return settings with an ellipsis for values under secrets' names."""
    if isinstance(value, dict):
        return {name: "…" if held and hides(str(name)) else veiled_value(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [veiled_value(one) for one in value]
    return veiled(value) if isinstance(value, str) else value


def _named_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each value after a secret's name."""
    position = 0
    while name := _NAME.search(text, position):
        position = name.end()
        if not hides_any(name[1]):
            continue
        if quoted := _QUOTED.match(text, position):
            start, end = quoted.span(2)
        else:
            start, end = position, _end_of_bare(text, position, name)
        if start < end and _NO_VALUE.match(text[start:end]) is None:
            yield start, end
            position = end


def _end_of_bare(text: str, start: int, name: re.Match[str]) -> int:
    """Return the end of an unquoted value: the next space or quote, for a header the next quote, for a list the end of
    the line; its start if it is a sentence."""
    word = text[start : start + _LONGEST].split(maxsplit=1)
    if name[2] == ":" and word and word[0].strip(".,:;!").lower() in _PROSE:
        return start
    if text.startswith(_OPENING, start):
        found = _REST_OF_LINE.match(text, start)
    else:
        found = (_REST if _HEADERS.search(name[1]) else _WORD).match(text, start)
    return start if found is None else found.end()


def _blank(text: str) -> str:
    return f"…{' ' * (len(text) - 1)}"

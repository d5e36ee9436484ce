"""Says in plain words what PyYAML's scanner and parser stumbled over, and where."""

from __future__ import annotations

from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

_PROBLEMS = (  # part of PyYAML's problem, what it means, what to do
    ("'\\t' that cannot start any token", "a tab where spaces belong", "indent with spaces"),
    ("that cannot start any token", "text cannot start with this character", "put the text in quotes"),
    (
        "mapping values are not allowed here",
        "a colon that is not expected here",
        "check the indentation here and above, or quote",
    ),
    ("expected <block end>", "does not line up with the keys above", "indent the keys of one group alike"),
    ("could not find expected ':'", "a key without a colon", "write `key: value`"),
    ("expected ',' or ']'", "a list that is not closed", "add ]"),
    ("expected ',' or '}'", "a group that is not closed", "add }"),
    ("unknown escape character", "an escape that YAML does not know", "use single quotes, or double the backslash"),
)


def explain_syntax(error: Exception, text: str) -> tuple[int, int, str, str]:
    """Line and column (from 1), what is wrong, what to do."""
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        return line, column, f"character U+{error.character:04X} is not allowed", "remove it"
    if not isinstance(error, MarkedYAMLError):
        return 1, 1, "not valid YAML: an escape names no character", "check the \\x, \\u and \\U escapes"
    mark = error.problem_mark or error.context_mark
    what, fix = f"not valid YAML: {error.problem}", ""
    for pattern, meaning, remedy in _PROBLEMS:
        if pattern in str(error.problem):
            what, fix = f"not valid YAML: {meaning}", remedy
            break
    if "quoted scalar" in str(error.context) and "end of stream" in str(error.problem):
        what, fix = "not valid YAML: a quote that is not closed", "add the closing quote"
    if error.context_mark and ("is not closed" in what):
        mark = error.context_mark  # where it was opened
    if mark is None:
        return 1, 1, what, fix
    return mark.line + 1, mark.column + 1, what, fix

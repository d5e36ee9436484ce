"""`surefoot schema` prints the schema that the tests of the config check against an independent validator."""

from __future__ import annotations

import json

import jsonschema
from click.testing import CliRunner

from surefoot.commands.main import main
from surefoot.config.keys import config_schema


def test_schema_is_printed_as_plain_ascii_json() -> None:
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(config_schema()))
    assert result.stdout.isascii(), "a redirect on any system gives a file that editors can read"
    jsonschema.Draft202012Validator.check_schema(json.loads(result.stdout))

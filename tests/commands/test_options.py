"""What every measurement is asked on is said behind MODEL or by an option, in all of them alike."""

import click
import pytest
from click.testing import CliRunner

from surefoot.commands.evaluate import MEASUREMENTS, evaluate
from surefoot.commands.options import argument_or_option, model_options


@click.command()
@model_options
@argument_or_option("data", "Records.", required=True)
@click.option("--only")
def measure(model: str, adapter: str | None, data: str, only: str | None) -> None:
    click.echo(f"{model} {adapter} {data} {only}")


@click.command()
@model_options
@argument_or_option("data", "Records.")
def lenient(model: str, adapter: str | None, data: str | None) -> None:
    click.echo(f"{model} {data}")


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_all_measurements_take_it_both_ways(name):
    command = evaluate.get_command(click.Context(evaluate), name)
    assert command is not None
    arguments = [one.name for one in command.params if isinstance(one, click.Argument)]
    options = [flag for one in command.params if isinstance(one, click.Option) for flag in one.opts]
    assert arguments[0] == "model"
    assert len(arguments) == 2
    assert f"--{arguments[1]}" in options


@pytest.mark.parametrize("words", [["m", "d", "--only", "x"], ["m", "--data", "d", "--only", "x"]])
def test_both_ways_mean_the_same(words):
    assert CliRunner().invoke(measure, words).output == "m None d x\n"


def test_twin_both_at_once_or_none_where_it_is_needed_is_refused():
    for words in (["m", "d", "--data", "d"], ["m"], []):
        assert CliRunner().invoke(measure, words).exit_code == 2
    assert CliRunner().invoke(lenient, ["m"]).output == "m None\n"

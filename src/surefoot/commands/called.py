"""Commands called from Python, as the scripts of compat do for `from finetune import train` and `run_exp`.

What goes wrong is an exception (`surefoot.system.errors`) whose text is what the command line would print; a run that a
signal stopped ends in KeyboardInterrupt, so that nothing goes on with half a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from surefoot.commands.exits import Invocation
from surefoot.commands.main import main
from surefoot.commands.train import train_translation
from surefoot.interop.translation import Translation
from surefoot.system.errors import STOPPED_EXIT_CODE, InputError, SurefootError


def call_words(words: Sequence[str]) -> None:
    """`surefoot run -- WORDS`."""
    invocation = Invocation(typed=("run", "--", *words))
    _call(invocation, lambda: main(list(invocation.typed), standalone_mode=False, obj=invocation))


def call_training(read: Callable[[], Translation], words: Sequence[str]) -> None:
    """Train what `read` gives. words: a command that means the same, for the hint how to resume."""
    invocation = Invocation(typed=("run", "--", *words))

    def train() -> int:
        with click.Context(main, obj=invocation):
            return train_translation(read())

    _call(invocation, train)


def _call(invocation: Invocation, run: Callable[[], object]) -> None:
    try:
        code = run()
    except click.ClickException as error:
        raise InputError(error.format_message()) from None
    except SurefootError as error:
        if not error.faults:  # another rank says why
            raise
        raise type(error)([invocation.locate(fault) for fault in error.faults]) from None
    if code == STOPPED_EXIT_CODE:
        raise KeyboardInterrupt("the run was stopped; its last lines say how to go on")

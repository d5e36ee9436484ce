"""`python -m surefoot`, which launchers of many processes call."""

from surefoot.commands.main import main

main(prog_name="surefoot")

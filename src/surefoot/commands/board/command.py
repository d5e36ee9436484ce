"""`surefoot board`: a live page of the runs in a folder, for the browser of this machine."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.printing import echo


@click.command()
@click.argument("runs", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; a free one by default.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in your browser.")
def board(runs: Path, port: int, open_page: bool) -> None:
    """Show the runs in RUNS and in folders of it, running and ended ones, on a page that keeps itself up to date.

    The page is served to this machine alone, and only to whoever has the printed address. It changes nothing. Ctrl-C
    ends it. To see it from elsewhere: ssh -L PORT:127.0.0.1:PORT this-machine.
    """
    import signal
    import webbrowser

    from surefoot.commands.board.listing import list_runs
    from surefoot.commands.board.server import Board

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has `board RUNS &` ignore it, and train hears it
    try:
        with Board(runs, port) as server:
            count = len(list_runs(runs))
            echo(f"{count} {'run' if count == 1 else 'runs'} in {runs}; Ctrl-C ends this page, not the runs")
            echo(server.address)
            if open_page:
                webbrowser.open(server.address)
            server.serve_forever()
    except KeyboardInterrupt:
        echo()

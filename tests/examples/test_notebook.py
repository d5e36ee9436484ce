"""The notebook of examples/ runs from top to bottom; in the long tier in a real kernel, twice in the same one."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first-run.ipynb"
SECONDS = 120  # for one cell; a cell that hangs must not hang the suite


def execute(book, folder):
    NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return book


def texts(book):
    """What the cells printed, and their last values. Libraries that are called by themselves draw bars on stderr."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.fixture(scope="module")
def book():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_its_cells_run_one_behind_the_other(book, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in book.cells:
        if cell.cell_type == "code":
            source = re.sub(r'"(\d+) steps"', lambda found: f'"{int(found[1]) // 15} steps"', cell.source)
            exec(compile(source.replace('"examples": 40', '"examples": 4'), "first-run.ipynb", "exec"), names)
    evaluated = [row["current_steps"] for row in names["rows"] if "eval_loss" in row]
    assert (evaluated[-1], len(names["rows"]) > len(evaluated) > 2) == (4, True), evaluated
    assert names["longer"].results["eval_loss"] > 0


@pytest.mark.slow
def test_it_runs_twice_in_one_kernel_and_prints_plain_lines(book, tmp_path):
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    again = [nbformat.v4.new_code_cell(cell.source) for cell in cells]
    freed = nbformat.v4.new_code_cell(
        "import gc, torch\n"
        "del model\n"
        "gc.collect()\n"
        "print('tensors left:', sum(isinstance(one, torch.nn.Parameter) for one in gc.get_objects()))"
    )
    done = execute(nbformat.v4.new_notebook(cells=[*cells, *again, freed]), tmp_path)
    said = texts(done)
    assert "done: 30 steps" in said
    assert "done: 60 steps" in said
    assert "exact match" in said
    assert "\x1b" not in said
    assert "\r" not in said
    assert "tensors left: 0" in said
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_twin_a_cell_that_fails_is_seen(tmp_path):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import surefoot\nsurefoot.train('no.yaml')")])
    with pytest.raises(CellExecutionError, match="InputError"):
        execute(broken, tmp_path)

"""A checkpoint damaged in any way is found, and the older one loaded."""

from faults.histories import save
from faults.mutations import MUTATIONS, mutate_once
from faults.soak import short_and_soak
from faults.trials import many

SHORT = 60


@short_and_soak("mutations", SHORT)
def test_mutations_are_found(trials, tmp_path):
    assert many("mutations", trials, mutate_once, tmp_path) == []


def test_every_kind_of_mutation_changes_something(tmp_path, seeded):
    """Else it would be found for no reason: a file's bytes, or the files that there are, or a folder's name."""
    for number, (what, mutation) in enumerate(MUTATIONS.items()):
        run = tmp_path / str(number)
        run.mkdir()
        for step in (1, 2):
            save(run, step)
        before = _content(run)
        mutation(run / "checkpoint-2" / "model.safetensors", seeded)
        assert _content(run) != before, what


def _content(run):
    return {path.relative_to(run).as_posix(): path.is_file() and path.read_bytes() for path in run.rglob("*")}

"""Who may write into a run folder, and what a resumed run takes over from it."""

import json

import pytest

from helpers.faults import gives, raises_fault
from helpers.model_layouts import run_config
from helpers.plans import run_plan
from helpers.toy_model import save_checkpoint, toy_engine
from surefoot.config.load import dump_config
from surefoot.planning.plan import plan_to_json
from surefoot.runs import output_folder as occupied
from surefoot.runs.run_folder import FolderState, inspect_folder, lock_folder
from surefoot.system import disk, durable
from surefoot.system.errors import InputError
from surefoot.training.state import RunState

PLAN = run_plan(trainable=1, parameters=2)
DATA = {"train": "1e4", "eval": "no"}  # texts that readers of YAML take for a number and for false


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def config(folder):
    def config(**changes):
        return run_config(**{"output": str(folder), "data": DATA, "optim": {"lr": 1e-4}} | changes)

    return config


@pytest.fixture
def started(folder, config):
    """A run that was killed before its first checkpoint."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config()))
    (folder / "plan.json").write_text(json.dumps({"plan": plan_to_json(PLAN), "verified": {}}))
    return folder


@pytest.fixture
def stopped(started):
    """A run with checkpoints 2 and 4."""
    for step in (2, 4):
        state = RunState(step=step)
        save_checkpoint(started, toy_engine(), state)
    return started


@pytest.fixture
def foreign(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def killed(*_args, **_kwargs):
    raise KeyboardInterrupt


@pytest.fixture
def look(tmp_path):
    """`inspect_folder`, held to its word that it changes nothing."""

    def look(config, mode):
        before = contents(tmp_path)
        try:
            return inspect_folder(config, mode)
        finally:
            assert contents(tmp_path) == before

    return look


def refusal(look, config, mode):
    """The one fault."""
    with pytest.raises(InputError) as caught:
        look(config, mode)
    (fault,) = caught.value.faults
    return fault


class TestWhoseFolder:
    @pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
    @pytest.mark.parametrize("exists", [False, True])
    def test_an_empty_one_is_free(self, look, config, folder, mode, exists):
        if exists:
            folder.mkdir()
        assert look(config(), mode) == FolderState(folder, mode)

    def test_where_nothing_was_saved_the_same_command_begins_anew(self, look, config, started):
        """An error in the first steps leaves records and logs. Whatever was saved is the twin."""
        assert look(config(optim={"lr": 7e-7}), "new") == FolderState(started, "resume")
        assert look(config(), "overwrite") == FolderState(started, "overwrite")
        (started / "MANIFEST.json").touch()  # published; its checkpoints were deleted
        assert refusal(look, config(), "new").code == "SF-USE-OUTPUT"

    def test_a_save_that_is_completed_only_now_is_not_begun_over(self, config, started):
        """A kill between its two renames hid the only checkpoint."""
        save_checkpoint(started, toy_engine(), RunState(step=2))
        (started / "checkpoint-2").rename(started / f"{durable._REPLACED}checkpoint-2")
        with raises_fault("SF-USE-OUTPUT", "output"):
            inspect_folder(config(), "new")
        assert (started / "checkpoint-2").is_dir()

    def test_an_occupied_one_is_not_begun_in(self, look, config, stopped):
        fault = refusal(look, config(), "new")
        assert fault.where == "output"
        assert "--resume" in fault.fix
        assert "--overwrite" in fault.fix

    @pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
    def test_a_strangers_is_neither_replaced_nor_resumed(self, look, config, foreign, mode):
        fault = refusal(look, config(), mode)
        assert (fault.code, fault.where) == ("SF-USE-OUTPUT", "output")
        assert gives(fault.what, str(foreign))
        assert not {"--resume", "--overwrite"} & {*fault.fix.split()}  # neither would help

    @pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
    def test_taking_a_stranger_for_a_run_would_be_noticed(self, look, config, foreign, mode, monkeypatch):
        monkeypatch.setattr(occupied, "_is_run_folder", lambda folder: True)
        with pytest.raises((pytest.fail.Exception, AssertionError)):
            self.test_a_strangers_is_neither_replaced_nor_resumed(look, config, foreign, mode)

    def test_a_config_or_another_tools_checkpoint_makes_no_run(self, look, config, foreign):
        (foreign / "checkpoint-5").mkdir()
        (foreign / "config.yaml").write_text("model: x\n")
        (foreign / "plan.json").write_text('{"weeks": 12}')
        fault = refusal(look, config(), "overwrite")
        assert (fault.code, fault.where) == ("SF-USE-OUTPUT", "output")

    def test_checkpoints_of_ours_make_a_run(self, look, config, stopped):
        (stopped / "plan.json").unlink()
        assert look(config(), "overwrite") == FolderState(stopped, "overwrite")

    def test_overwriting_its_own_inputs_is_refused(self, look, config, stopped):
        (stopped / "mine.json").write_text("[]")
        inside = str(stopped / "mine.json")
        changes = {"model": str(stopped / "checkpoint-4"), "data": {"train": inside, "eval": inside}}
        with pytest.raises(InputError) as caught:
            look(config(**changes), "overwrite")
        assert [fault.where for fault in caught.value.faults] == ["model.path", "data.train", "data.eval"]

    def test_overwriting_its_own_template_or_described_files_is_refused(self, look, config, stopped, monkeypatch):
        (stopped / "mine.jinja").write_text("{{ messages }}")
        (stopped / "mine.json").write_text("[]")
        described = {"ours": {"file_name": f"{stopped.name}/mine.json"}, "hub": {"hf_hub_url": "a/b"}}
        (stopped.parent / "dataset_info.json").write_text(json.dumps(described))
        sources = {"train": {"path": str(stopped.parent), "name": "ours"}, "template": str(stopped / "mine.jinja")}
        with pytest.raises(InputError) as caught:
            look(config(data=sources), "overwrite")
        assert [fault.where for fault in caught.value.faults] == ["data.template", "data.train"]
        (stopped / "mine.json").unlink()
        assert look(config(data=sources | {"template": "chatml"}), "overwrite").mode == "overwrite"
        monkeypatch.setattr(occupied, "is_users_own", lambda name: False)  # twin
        assert look(config(data=sources), "overwrite").mode == "overwrite"

    @pytest.mark.parametrize("mode", ["new", "resume"])
    def test_what_a_kill_in_the_first_write_leaves_is_nothing(self, look, config, folder, mode):
        folder.mkdir()
        (folder / ".lock").touch()
        (folder / ".plan.json.12-0123abcd.tmp").touch()
        assert look(config(), mode) == FolderState(folder, mode)
        with lock_folder(inspect_folder(config(), mode)):
            assert [path.name for path in folder.iterdir()] == [".lock"]
        assert contents(folder) == {}

    def test_a_hidden_file_of_ones_own_is_something(self, look, config, folder):
        folder.mkdir()
        (folder / ".notes.tmp").touch()
        fault = refusal(look, config(), "new")
        assert (fault.code, fault.where) == ("SF-USE-OUTPUT", "output")

    @pytest.mark.parametrize("below", ["file/x", "file/x/y"])
    def test_an_impossible_place(self, look, config, tmp_path, below):
        (tmp_path / "file").touch()
        with raises_fault("SF-FILE-WRITE", tmp_path / below):
            look(config(output=str(tmp_path / below)), "new")

    def test_an_old_run_may_be_replaced(self, look, config, stopped):
        assert look(config(seed=7), "overwrite") == FolderState(stopped, "overwrite")

    @pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
    def test_a_file_is_no_folder(self, look, config, folder, mode):
        folder.write_text("not a folder")
        fault = refusal(look, config(), mode)
        assert (fault.code, fault.where) == ("SF-USE-OUTPUT", "output")
        assert gives(fault.what, str(folder))


class TestResume:
    def test_without_a_checkpoint_it_starts(self, look, config, started):
        assert look(config(seed=7), "resume") == FolderState(started, "resume")

    def test_the_newest_checkpoint_and_the_saved_plan_are_taken(self, look, config, stopped):
        found = look(config(), "resume")
        assert found.checkpoint.step == 4
        assert (found.plan, found.changes, found.rejected) == (PLAN, (), ())

    def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(self, look, config, stopped):
        (stopped / "checkpoint-4" / "state.json").write_text("{}")
        found = look(config(), "resume")
        assert found.checkpoint.step == 2
        assert "checkpoint-4" in found.rejected[0].where

    def test_verification_comes_before_the_config(self, look, config, stopped):
        for step in (2, 4):
            (stopped / f"checkpoint-{step}" / "state.json").write_text("{}")
        older = "SF-CHECKPOINT-DAMAGED", stopped / "checkpoint-2" / "state.json"
        newest = "SF-CHECKPOINT-DAMAGED", stopped / "checkpoint-4" / "state.json"
        with raises_fault(*newest, also=[older, ("SF-CHECKPOINT-NONE", stopped)]):
            look(config(seed=7), "resume")

    def test_changes_that_are_refused_are_all_named(self, look, config, stopped):
        code = "SF-RESUME-CHANGED"
        with raises_fault(code, "optim.lr", 0.0001, str(stopped), 0.001, also=[(code, "seed", 7)]):
            look(config(seed=7, optim={"lr": 1e-3}, log_every=5), "resume")

    def test_ignoring_changes_would_be_noticed(self, look, config, stopped, monkeypatch):
        monkeypatch.setattr(occupied, "diff_configs", lambda old, new: [])
        with pytest.raises(pytest.fail.Exception):
            self.test_changes_that_are_refused_are_all_named(look, config, stopped)

    def test_changes_that_are_free_or_warned_are_reported(self, look, config, stopped):
        found = look(config(log_every=5, duration="9 steps"), "resume")
        assert [(change.key, change.policy) for change in found.changes] == [
            ("duration", "warned"),
            ("log_every", "free"),
        ]
        assert found.checkpoint.step == 4

    @pytest.mark.parametrize(
        ("damage", "where"),
        [
            (lambda path: path.unlink(), "config.yaml"),
            (lambda path: path.write_text("optim: {lr: 1"), "config.yaml:1:8"),
            (lambda path: path.write_text("seed: 1\nseed: 2\nseed: 3\n"), "config.yaml:2:1"),
            (lambda path: path.write_text("seed: !!python/name:os.abort x"), "config.yaml:1:7"),
            (lambda path: path.write_text("words"), "config.yaml"),
            (lambda path: path.write_bytes(b"seed: \xff"), "config.yaml:1"),
        ],
        ids=["gone", "torn", "two faults", "tag", "no keys", "no text"],
    )
    def test_a_saved_config_that_cannot_be_read_is_one_line(self, look, config, stopped, damage, where):
        damage(stopped / "config.yaml")
        fault = refusal(look, config(), "resume")
        assert fault.where == f"{stopped}/{where}"
        assert fault.code
        assert "\n" not in str(fault)

    @pytest.mark.parametrize("text", [None, "{", "[]", '{"plan": 3}', "{}"])
    def test_a_saved_plan_that_cannot_be_read_is_one_line(self, look, config, stopped, text):
        (stopped / "plan.json").unlink()
        if text is not None:
            (stopped / "plan.json").write_text(text)
        fault = refusal(look, config(), "resume")
        assert fault.where.startswith(f"{stopped}/plan.json")
        assert fault.code
        assert "\n" not in str(fault)


class TestOccupy:
    def test_overwrite_replaces_the_old_run(self, config, stopped):
        with lock_folder(inspect_folder(config(), "overwrite")):
            assert [path.name for path in stopped.iterdir()] == [".lock"]  # still held
        assert contents(stopped.parent) == {stopped: None}

    def test_resume_clears_only_what_a_killed_process_left(self, config, stopped):
        before = contents(stopped)
        (stopped / ".checkpoint-6.1-0123abcd.tmp").mkdir()
        (stopped / ".checkpoint-6.1-0123abcd.tmp" / "half").write_text("x")
        (stopped / ".plan.json.1-0123abcd.tmp").write_text("x")
        with lock_folder(inspect_folder(config(), "resume")):
            pass
        assert contents(stopped) == before

    def test_a_rejected_checkpoint_is_set_aside(self, config, stopped):
        (stopped / "checkpoint-4" / "state.json").write_text("{}")
        with lock_folder(inspect_folder(config(), "resume")) as aside:
            assert aside == [stopped / ".rejected-checkpoint-4"]
        assert [path.name for path in stopped.glob("checkpoint-*")] == ["checkpoint-2"]
        with lock_folder(inspect_folder(config(), "resume")) as again:
            assert again == []
        assert aside[0].is_dir()

    def test_an_interrupted_overwrite_leaves_the_plan_or_nothing(self, config, stopped, monkeypatch):
        monkeypatch.setattr(disk, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt), lock_folder(inspect_folder(config(), "overwrite")):
            pass
        monkeypatch.undo()
        with lock_folder(inspect_folder(config(), "new")):
            pass
        assert contents(stopped) == {}

    def test_a_dangling_link_is_filled(self, config, folder, tmp_path):
        folder.symlink_to(tmp_path / "later")
        with lock_folder(inspect_folder(config(), "new")):
            assert (tmp_path / "later").is_dir()
        assert folder.is_symlink()

    def test_what_another_process_did_since_the_claim_is_seen(self, config, stopped):
        found = inspect_folder(config(), "resume")
        (stopped / "checkpoint-6").mkdir()
        with raises_fault("SF-FOLDER-BUSY", stopped), lock_folder(found):
            pass
        assert (stopped / "checkpoint-6").is_dir()

    @pytest.mark.parametrize("mode", ["new", "overwrite"])
    def test_what_a_stranger_wrote_since_the_claim_stays(self, config, folder, mode):
        found = inspect_folder(config(), mode)
        folder.mkdir()
        (folder / "thesis.txt").touch()
        with pytest.raises(InputError), lock_folder(found):
            pass
        assert [path.name for path in folder.iterdir()] == ["thesis.txt"]

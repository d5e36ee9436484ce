"""All that the package writes for good goes through `disk`: nothing else opens, names or removes files.

The exceptions are listed with their reason; one that is no longer needed must go from the list.
"""

import ast
from pathlib import Path

import surefoot

ROOT = Path(surefoot.__file__).parent
STAGED = "into a folder that durable.staged_folder flushes and names"
EMPTY = "an empty folder for what durable writes"
SCRATCH = "a scratch file of this process, which nobody reads later"
NOWHERE = "the null device"
IN_SCRIPT = "in the user's Python, which may have no surefoot; written anew at every take-over"
ALLOWED = {
    ("system/plain_files.py", "os.open"): "reads",
    ("methods/rewards/confined.py", "os.open"): "/dev/null, for what a tested program prints",
    ("methods/rewards/confined.py", "os.write"): "to a pipe, from a process that may import nothing",
    ("system/folder_lock.py", "os.write"): "the lock file, whose content only says who holds it",
    ("system/folder_lock.py", "os.ftruncate"): "the same",
    ("planning/probes/child.py", "tempfile.TemporaryFile"): "what a probe's process says of its end; it has no name",
    ("planning/probes/kept.py", "mkdir"): EMPTY,
    ("report/trackers/adapters.py", "mkdir"): "a folder for what a tracker writes",
    ("models/convert/safetensors_file.py", "open"): STAGED,
    ("models/convert/safetensors_file.py", "write_text"): STAGED,
    ("evaluate/capture_tensors.py", "save_file"): STAGED,
    ("models/qat.py", "save_pretrained"): STAGED,
    ("methods/distill/stored.py", "save_file"): STAGED,
    ("methods/distill/stored.py", "write_text"): STAGED,
    ("models/save.py", "mkdir"): STAGED,
    ("models/save.py", "save_file"): STAGED,
    ("models/save.py", "save_pretrained"): STAGED,
    ("models/save.py", "write_text"): STAGED,
    ("models/value_head.py", "save_file"): STAGED,
    ("commands/convert.py", "shutil.copyfile"): STAGED,
    ("runs/export/gguf.py", "unlink"): "of a staged folder that is not named yet",
    ("methods/policy.py", "save_pretrained"): STAGED,
    ("methods/ppo/start.py", "save_pretrained"): STAGED,
    ("methods/reference.py", "np.save"): STAGED,
    ("runs/convert_run.py", "save_pretrained"): STAGED,
    ("runs/job.py", "save_pretrained"): STAGED,
    ("training/checkpoint.py", "save_file"): STAGED,
    ("training/failure.py", "save_file"): STAGED,
    ("models/convert/pickled.py", "mkdir"): SCRATCH,
    ("models/convert/source.py", "mkdir"): SCRATCH,
    ("models/convert/source.py", "tempfile.mkdtemp"): SCRATCH,
    ("models/convert/unpickle.py", "mkdir"): SCRATCH,
    ("models/convert/unpickle.py", "write_text"): SCRATCH,
    ("commands/convert.py", "shutil.rmtree"): SCRATCH,
    ("commands/convert.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("commands/run.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("commands/migrate.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("methods/rollouts.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("runs/trial.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("commands/tune/attempt.py", "tempfile.TemporaryFile"): SCRATCH,
    ("commands/tune/run.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("interop/compat/scripts/debug_bos_zero.py", "tempfile.TemporaryDirectory"): SCRATCH,
    ("interop/compat/scripts/debug_bos_zero.py", "write_text"): SCRATCH,
    ("commands/main.py", "os.open"): NOWHERE,
    ("commands/migrate.py", "open"): NOWHERE,
    ("commands/train.py", "open"): NOWHERE,
    ("models/quiet.py", "os.open"): NOWHERE,
    ("report/console.py", "os.open"): NOWHERE,
    ("report/observer.py", "open"): NOWHERE,
    ("commands/run.py", "write_text"): "click's: words for the screen",
    ("training/interrupt.py", "os.write"): "words for the screen, from a signal handler",
    ("training/watchdog.py", "os.write"): "the same, from a thread that ends the process",
    (
        "data/tokenize/cache.py",
        "tempfile.TemporaryDirectory",
    ): "examples that no folder can be made for; gone with the process",
    ("data/formats/spool.py", "tempfile.TemporaryFile"): "what a user's function returned; gone with the call",
    ("interop/takeover/in_script/files.py", "open"): IN_SCRIPT,
    ("interop/takeover/in_script/files.py", "os.replace"): IN_SCRIPT,
    ("interop/takeover/in_script/handover.py", "mkdir"): IN_SCRIPT,
    ("interop/takeover/in_script/handover.py", "save_pretrained"): IN_SCRIPT,
    ("interop/takeover/in_script/handover.py", "shutil.copyfile"): IN_SCRIPT,
    ("interop/takeover/in_script/handover.py", "shutil.rmtree"): IN_SCRIPT,
    ("interop/takeover/in_script/handover.py", "touch"): IN_SCRIPT,
    ("interop/takeover/in_script/weights.py", "mkdir"): IN_SCRIPT,
    ("interop/takeover/in_script/weights.py", "os.symlink"): IN_SCRIPT,
    ("interop/takeover/in_script/weights.py", "save_file"): IN_SCRIPT,
    ("interop/takeover/in_script/weights.py", "save_pretrained"): IN_SCRIPT,
    ("evaluate/answers.py", "tempfile.TemporaryDirectory"): "replies of an environment while it is measured",
    ("interop/takeover/session.py", "tempfile.TemporaryDirectory"): "the socket to a script, until it has connected",
    ("runs/failures/replay_run.py", "open"): "a pipe to the process that started this one",
    ("commands/tune/worker.py", "open"): "a pipe to the process that started this one",
}
_PATHS = {"mkdir", "rmdir", "unlink", "rename", "touch", "chmod", "lchmod", "symlink_to", "hardlink_to", "write_bytes"}
_PATHS |= {"write_text", "save_pretrained", "savefig"}
_OS = {"open", "write", "truncate", "ftruncate", "rename", "renames", "replace", "remove", "removedirs", "unlink"}
_OS |= {"rmdir", "mkdir", "makedirs", "link", "symlink", "fsync", "mkfifo", "mknod"}
_SHUTIL = {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree", "copymode", "make_archive"}
_SAVERS = {"save_file", "save_model"}
_OWN = {"durable", "disk"}  # modules whose functions are the right way


def writes(source: str) -> set[str]:
    """Names of the calls in it that change a disk."""
    return {name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and (name := _write(node))}


def _write(call: ast.Call) -> str:
    match call.func:
        case ast.Name("open") | ast.Attribute(ast.Name("io" | "os"), "fdopen"):
            return "open" if _opens_for_writing(call, 1) else ""
        case ast.Name(name) if name in _SAVERS:
            return name
        case ast.Attribute(ast.Name("os"), name) if name in _OS:
            return f"os.{name}"
        case ast.Attribute(ast.Name("shutil"), name) if name in _SHUTIL:
            return f"shutil.{name}"
        case ast.Attribute(ast.Name("np"), "save" | "savez" | "memmap"):
            return "np.save"
        case ast.Attribute(ast.Name("torch"), "save"):
            return "torch.save"
        case ast.Attribute(ast.Name("tempfile"), name):
            return f"tempfile.{name}"
        case ast.Attribute(ast.Name(module), _) if module in _OWN:
            return ""
        case ast.Attribute(_, "open"):
            return "open" if _opens_for_writing(call, 0) else ""
        case ast.Attribute(_, name) if name in _PATHS:
            return name
    return ""


def _opens_for_writing(call: ast.Call, place: int) -> bool:
    modes = [call.args[place]] if len(call.args) > place else [one.value for one in call.keywords if one.arg == "mode"]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)


def found_in_package() -> set[tuple[str, str]]:
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "disk.py"
        for name in writes(path.read_text(encoding="utf-8"))
    }


def test_nothing_else_writes():
    found = found_in_package()
    assert found - set(ALLOWED) == set(), "write it by durable, or say here why not"
    assert set(ALLOWED) - found == set(), "no longer there: take it from the list"


def test_twin_a_write_is_seen():
    assert writes("open(p, 'w'); Path(p).open('ab'); p.write_text('x')") == {"open", "write_text"}
    assert writes("os.rename(a, b); shutil.rmtree(a); save_file(t, p); np.save(p, a)") == {
        *("os.rename", "shutil.rmtree", "save_file", "np.save"),
    }
    assert (
        writes("open(p); open(p, 'rb'); durable.write_text(p, 'x'); 'a'.replace('a', 'b'); disk.rename(a, b)") == set()
    )

"""Read a repository of the hub through huggingface_hub and its cache: which commit, which files, and some of them here.

A revision is resolved to its commit once; everything after that is of this commit, however the branch moves. What the
cache holds is not asked for again, so a known commit works without a network. Tokens stay with huggingface_hub.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from surefoot import hardware
from surefoot.errors import EnvironmentFault, Fault
from surefoot.hub.faults import hub_faults

_COMMIT = re.compile("[0-9a-f]{40}")
_PATIENCE = 10.0  # seconds for an answer without which nothing goes on; the client itself would wait for ever
_TIMEOUT = 4.0  # seconds until a silent hub counts as away while the cache may do instead


@dataclass(frozen=True)
class Repository:
    """One commit of a repository. kind: model | dataset. revision: as it was asked for. folder: of the commit in the
    cache; not there before something is fetched. files: their sizes in bytes, sorted by name."""

    name: str
    kind: str
    revision: str | None
    commit: str
    folder: Path
    files: Mapping[str, int]


def look_up(name: str, kind: str, revision: str | None) -> Repository:
    """The commit that `revision` (a branch, tag or commit; None: main) means now, and its files.

    Raises InputError for a name or revision that the hub does not have, EnvironmentFault where it cannot be reached or
    denies access and the cache does not help.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with hub_faults(name, kind, revision), _client():
        folder = _listed(name, kind, revision)
        try:
            tree = get_cached_repo_tree(name, repo_type=kind, revision=folder.name)
            files = {file.path: file.size for file in tree}
        except CachedRepoTreeNotFoundError:  # put there by a tool that keeps no listing, and the hub is away
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return Repository(name, kind, revision, folder.name, folder, dict(sorted(files.items())))


def _listed(name: str, kind: str, revision: str | None) -> Path:
    """The commit's folder in the cache, which is named after it; the listing of its files lies in the cache, too."""
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    away = None
    if not _COMMIT.fullmatch(revision or ""):
        try:  # snapshot_download asks the same, and without a limit of time
            HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=_TIMEOUT)
        except RevisionNotFoundError:
            raise
        except (HfHubHTTPError, httpx2.TransportError, OfflineModeIsEnabled) as error:
            away = error
    try:
        found = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=[], local_files_only=away is not None
        )
    except LocalEntryNotFoundError as error:
        raise away or error from error.__cause__
    return Path(found)


def fetch(repository: Repository, paths: Collection[str]) -> Path:
    """The folder of the commit with these of its files in it. Raises as `look_up` does, and EnvironmentFault where the
    disk has no room, which is found before the download."""
    from huggingface_hub import snapshot_download

    missing = [path for path in paths if not (repository.folder / path).is_file()]
    _check_room(repository, sum(repository.files[path] for path in missing))
    with hub_faults(repository.name, repository.kind, repository.revision), _client():
        return Path(
            snapshot_download(
                repository.name,
                repo_type=repository.kind,
                revision=repository.commit,
                allow_patterns=[glob.escape(path) for path in paths],
                etag_timeout=_TIMEOUT,
            )
        )


def _check_room(repository: Repository, needed: int) -> None:
    place = repository.folder
    while not place.exists():
        place = place.parent
    if needed > (free := hardware.free_disk(place)):
        what = f"{needed / 1e9:.1f} GB are to be downloaded, and the disk of the cache has {free / 1e9:.1f} GB free"
        raise EnvironmentFault(Fault(repository.name, what, "make room, or set HF_HOME to a folder on a larger disk"))


@contextmanager
def _client() -> Iterator[None]:
    """Time limits where the client has none, and silence: its warnings repeat what the faults say, its bars redraw
    their line, which in a log is a mess."""
    import httpx2
    from huggingface_hub import get_session
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    get_session().timeout = httpx2.Timeout(_PATIENCE)
    verbosity, silenced = logging.get_verbosity(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not silenced:
            enable_progress_bars()

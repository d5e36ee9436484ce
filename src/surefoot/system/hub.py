"""Read a repository of the hub through huggingface_hub and its cache: its commit, its file list, the files themselves.

    repository = look_up("org/name", "model", None)
    folder = fetch(repository, ["config.json"])

A revision is resolved to its commit once; everything after that is of this commit, however the branch moves. What the
cache holds is not asked for again, so a known commit works without a network. Where the hub cannot be reached, a branch
means the commit that the cache last saw for it, and a warning says so. Tokens stay with huggingface_hub.

Refusals become one line each, in the same words for models and data sets (`hub_faults`). The hub answers 401 and 403
for several reasons: without a token it hides that a private repository exists, a token it does not know is an error of
its own, a gated repository is listed but not handed out. Nothing that the hub or its client wrote is repeated where it
could hold a token.
"""

from __future__ import annotations

import glob
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.system import durable, hardware
from surefoot.system.errors import EnvironmentFault, Fault, InputError, SurefootError
from surefoot.system.messages import size_text
from surefoot.system.redaction import redacted

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

NOUN = {"model": "model", "dataset": "data set"}
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_COMMIT = re.compile("[0-9a-f]{40}")
_PATIENCE = 10.0  # seconds for an answer without which nothing goes on; the client itself would wait for ever
_TIMEOUT = 4.0  # seconds until a silent hub counts as away while the cache may do instead
_BUSY = 429  # besides 5xx the only status that says nothing of the name, the revision or the token
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repository:
    """One commit of a repository.

    kind: model | dataset.
    revision: as it was asked for.
    folder: of the commit in the cache; not there before something is fetched.
    files: their sizes in bytes, sorted by name.
    caution: where the hub was away, which commit the cache had for the revision, and why.
    """

    name: str
    kind: str
    revision: str | None
    commit: str
    folder: Path
    files: Mapping[str, int]
    caution: str = ""


def look_up(name: str, kind: str, revision: str | None) -> Repository:
    """The commit that `revision` (a branch, tag or commit; None: main) means now, and its files.

    Raises InputError for a name or revision that the hub does not have, EnvironmentFault where it denies access, and
    where it is away and the cache does not help. Where the cache does, a warning is logged.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with hub_faults(name, kind, revision), bounded_client():
        folder, away = _listed(name, kind, revision)
        try:
            files = {file.path: file.size for file in get_cached_repo_tree(name, repo_type=kind, revision=folder.name)}
        except CachedRepoTreeNotFoundError:  # put there by a tool that keeps no listing, and the hub is away
            files = _unlisted(name, kind, folder)
    caution = ""
    if away:
        caution = f"{name}: {away}, so it is read at commit {folder.name}, the last that the cache knows as "
        caution += f"{revision or 'main'}"
        _logger.warning(caution)
    return Repository(name, kind, revision, folder.name, folder, dict(sorted(files.items())), caution)


def _listed(name: str, kind: str, revision: str | None) -> tuple[Path, str]:
    """The commit's folder in the cache, which is named after it; the listing of its files lies in the cache, too.

    And why the cache had to say which commit it is: empty where the hub did, and where it was not to be asked.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    commit, away = revision if _COMMIT.fullmatch(revision or "") else None, None
    if commit is None:
        try:  # snapshot_download asks the same, without a limit of time, and takes what is cached for any answer
            commit = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=_TIMEOUT).sha
        except HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code != _BUSY:
                raise
            away = error
        except (httpx2.TransportError, OfflineModeIsEnabled) as error:
            away = error
    # No pattern: the snapshot is asked for its commit and its list of files, not for a file.
    known = {"repo_type": kind, "allow_patterns": [], "local_files_only": away is not None}
    try:
        found = Path(snapshot_download(name, revision=revision, **known))  # notes in the cache what a branch means
        if commit not in (None, found.name):  # the hub went away, or the branch moved, between the two questions
            found = Path(snapshot_download(name, revision=commit, **known))
    except LocalEntryNotFoundError as error:
        raise away or error from error.__cause__
    return found, _why(away)


def _why(away: Exception | None) -> str:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if away is None or isinstance(away, OfflineModeIsEnabled):
        return ""
    if isinstance(away, HfHubHTTPError):
        return f"the hub answered {away.response.status_code}"
    slow = isinstance(away, httpx2.TimeoutException)
    return "the hub does not answer in time" if slow else "the hub cannot be reached"


def _unlisted(name: str, kind: str, folder: Path) -> dict[str, int]:
    """The files of a commit of which the cache has no listing. Those of a model say themselves what belongs to them;
    of data, a part looks like the whole."""
    if kind == "dataset":
        what = f"the cache has files of this {NOUN[kind]} and no list of all its files, so some may be missing"
        raise _away(name, what, "start again while the hub can be reached")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def fetch(repository: Repository, paths: Collection[str]) -> Path:
    """The folder of the commit with these of its files in it. Raises as `look_up` does, and EnvironmentFault where the
    disk has no room, which is found before the download."""
    from huggingface_hub import snapshot_download

    missing = [path for path in paths if not (repository.folder / path).is_file()]
    if not missing:
        return repository.folder
    _check_room(repository, sum(repository.files[path] for path in missing))
    with hub_faults(repository.name, repository.kind, repository.revision), _quiet_client():
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
    if needed > (free := hardware.free_disk(durable.nearest_existing(repository.folder))):
        what = f"{size_text(needed)} are to be downloaded, and the disk of the cache has {size_text(free)} free"
        raise EnvironmentFault(
            Fault(repository.name, what, "make room, or set HF_HOME to a folder on a larger disk", code="SF-DISK-FULL")
        )


@contextmanager
def bounded_client() -> Iterator[None]:
    """Questions to the hub inside end within `_PATIENCE` seconds: the client has no limit for most of them."""
    import httpx2
    from huggingface_hub import get_session

    session = get_session()
    before, session.timeout = session.timeout, httpx2.Timeout(_PATIENCE)
    try:
        with _quiet_client():
            yield
    finally:
        session.timeout = before


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Its warnings repeat what the faults say, and its bars redraw their line, which in a log is a mess."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

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


@contextmanager
def hub_faults(name: str, kind: str, revision: str | None) -> Iterator[None]:
    """Errors of huggingface_hub inside become InputError (exit 2: name, revision, file) or EnvironmentFault (exit 3:
    access, network, disk). kind: model | dataset."""
    import httpx2
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError

    try:
        yield
    except (LocalEntryNotFoundError, RevisionResolutionError) as error:  # nothing cached either; the cause says why
        raise _fault(name, kind, revision, error.__cause__ or error) from None
    except (OSError, httpx2.HTTPError) as error:
        raise _fault(name, kind, revision, error) from None


def _fault(name: str, kind: str, revision: str | None, error: BaseException) -> SurefootError:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    local = f"give a local {'folder' if kind == 'model' else 'file'}"
    missing = "is not, or not wholly, in the cache, and"
    if isinstance(error, HfHubHTTPError):
        return _refusal(name, kind, revision, error)
    if isinstance(error, OfflineModeIsEnabled):
        return _away(name, f"{missing} HF_HUB_OFFLINE is set", f"unset it to download the {NOUN[kind]}, or {local}")
    if isinstance(error, httpx2.TimeoutException):
        return _away(name, f"{missing} the hub does not answer in time", f"try again later, or {local}")
    if isinstance(error, httpx2.ConnectError | LocalEntryNotFoundError):
        return _away(name, f"{missing} the hub cannot be reached", f"check the network, or {local}")
    if isinstance(error, httpx2.TransportError):
        return _away(name, "the download broke off", "check the network and start again")
    return _away(name, f"cannot be downloaded: {_first_line(error)}", "check the network and the disk")


def _away(name: str, what: str, fix: str) -> EnvironmentFault:
    return EnvironmentFault(Fault(name, what, fix, code="SF-HUB-OFFLINE"))


def denied(name: str, what: str, fix: str) -> EnvironmentFault:
    """The hub does not give access to the repository `name`."""
    return EnvironmentFault(Fault(name, what, fix, code="SF-HUB-ACCESS"))


def _missing(name: str, what: str, fix: str) -> InputError:
    return InputError(Fault(name, what, fix, code="SF-HUB-MISSING"))


def _refusal(name: str, kind: str, revision: str | None, error: HfHubHTTPError) -> SurefootError:
    from huggingface_hub import errors, get_token

    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    status, signed_in = error.response.status_code, get_token() is not None
    gated = isinstance(error, errors.GatedRepoError)
    if gated and not signed_in:
        return denied(name, "is gated, and no token was sent", f"accept its terms at {page}, {_LOG_IN}")
    if status == 401 and signed_in:
        what = "the hub does not accept the token that was sent: it is mistyped, expired or revoked"
        return denied(name, what, f"make one at https://huggingface.co/settings/tokens, then {_LOG_IN}")
    if gated:
        what = "is gated, and this account has no access: its terms are not accepted, or the request is still open"
        return denied(name, what, f"accept its terms at {page}")
    if isinstance(error, errors.RevisionNotFoundError):
        return _missing(name, f"the {NOUN[kind]} has no revision {revision or 'main'!r}", f"see {page}/tree/main")
    if isinstance(error, errors.EntryNotFoundError):
        return _missing(name, f"the {NOUN[kind]} lacks a file that it lists", f"see {page}/tree/main")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        fix = "check the name" if signed_in else f"check the name; if it is private, {_LOG_IN}"
        return _missing(name, f"the hub has no {'' if signed_in else 'public '}{NOUN[kind]} of this name", fix)
    if status == 403:
        return denied(name, "access is forbidden", f"use a token that may read it: {_LOG_IN}")
    if status == _BUSY:
        return _away(name, "the hub answered 429: too many requests", f"wait a little; {_LOG_IN}")
    return _away(name, f"the hub answered {status}", "try again later")


def _first_line(error: BaseException) -> str:
    return redacted((str(error) or type(error).__name__).splitlines()[0])


def is_signed_in() -> bool:
    """A token is stored, or set in the environment."""
    from huggingface_hub import get_token

    return get_token() is not None


def hub_obstacle() -> str:
    """Why nothing could be fetched now, empty where it could. One question, with the token if there is one."""
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    question = "/api/whoami-v2" if is_signed_in() else "/api/models?limit=1"
    try:
        answer = get_session().get(constants.ENDPOINT + question, headers=build_hf_headers(), timeout=_TIMEOUT)
        hf_raise_for_status(answer)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except httpx2.TimeoutException:
        return "it does not answer in time"
    except httpx2.TransportError:
        return "it cannot be reached"
    except HfHubHTTPError as error:
        status = error.response.status_code
        return "it does not accept the token that is stored" if status == 401 else f"it answered {status}"
    return ""

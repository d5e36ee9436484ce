"""Read a repository of the hub through huggingface_hub and its cache: its commit, its file list, and its files.

    repository = look_up("org/name", "model", None)
    folder = fetch(repository, ["config.json"])

A revision is resolved to its commit once; everything later uses that commit, even if the branch moves. Cached content
is not requested again, so a known commit works offline. If the hub cannot be reached, a branch means the commit that
the cache last saw for it, with a warning. Tokens stay in huggingface_hub.

Errors become one line each, in the same words for models and data sets (`hub_faults`). The hub answers 401 and 403 for
several reasons: without a token it hides private repositories, an unknown token is its own error, a gated repository is
listed but not downloadable. Messages of the hub or its client are not repeated if they could contain a token.
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
from surefoot.system.locations import looks_local
from surefoot.system.messages import size_text
from surefoot.system.redaction import redacted

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

NOUN = {"model": "model", "dataset": "data set"}
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_COMMIT = re.compile("[0-9a-f]{40}")
_PATIENCE = 10.0  # seconds to wait for a required answer; the client itself has no limit
_TIMEOUT = 4.0  # seconds to wait for an answer that the cache can replace
_BUSY = 429  # like 5xx, a status that says nothing about name, revision or token
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repository:
    """One commit of a repository.

    kind: model | dataset.
    revision: as requested.
    folder: the commit's cache folder; does not exist before something is fetched.
    files: file sizes in bytes, sorted by name.
    caution: if the hub was unreachable, which cached commit is used, and why.
    """

    name: str
    kind: str
    revision: str | None
    commit: str
    folder: Path
    files: Mapping[str, int]
    caution: str = ""


def look_up(name: str, kind: str, revision: str | None) -> Repository:
    """Resolve `revision` (a branch, tag or commit; None: main) to its commit and list its files.

    Raises InputError for an unknown name or revision, EnvironmentFault if access is denied, or if the hub is
    unreachable and the cache does not help. If the cache helps, a warning is logged.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with hub_faults(name, kind, revision), bounded_client():
        folder, away = _listed(name, kind, revision)
        try:
            files = {file.path: file.size for file in get_cached_repo_tree(name, repo_type=kind, revision=folder.name)}
        except CachedRepoTreeNotFoundError:  # cached by a tool without a file list, and the hub is unreachable
            files = _unlisted(name, kind, folder)
    caution = ""
    if away:
        caution = f"{name}: {away}, so the cached commit {folder.name} is used, the last one seen for "
        caution += f"{revision or 'main'}"
        _logger.warning(caution)
    return Repository(name, kind, revision, folder.name, folder, dict(sorted(files.items())), caution)


def _listed(name: str, kind: str, revision: str | None) -> tuple[Path, str]:
    """Return the commit's cache folder, which is named after it and whose file list is cached as well.

    Also return why the cache had to resolve the revision: empty if the hub did, or was not to be asked.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    commit, away = revision if _COMMIT.fullmatch(revision or "") else None, None
    if commit is None:
        try:  # snapshot_download would ask without a time limit and fall back to the cache on any error
            commit = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=_TIMEOUT).sha
        except HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code != _BUSY:
                raise
            away = error
        except (httpx2.TransportError, OfflineModeIsEnabled) as error:
            away = error
    # No patterns, because only the commit and its file list are wanted, no file.
    known = {"repo_type": kind, "allow_patterns": [], "local_files_only": away is not None}
    try:
        found = Path(snapshot_download(name, revision=revision, **known))  # stores the branch's commit in the cache
        if commit not in (None, found.name):  # the hub failed, or the branch moved, between the two requests
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
    """Files of a cached commit without a file list. A model's files say which others belong to it; a part of a data set
    would look complete."""
    if kind == "dataset":
        what = f"the cache has files of this {NOUN[kind]} but no list of all its files, so some may be missing"
        raise _away(name, what, "start again while the hub can be reached")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def in_cache(path: str) -> Path | None:
    """Return the file of `org/name/FILE` that the cache has of a model's main branch; None without one."""
    name, _, file = path.rpartition("/")
    if looks_local(name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:  # a folder that is not there, whose name could not be one of the hub's
        return None
    return Path(found) if isinstance(found, str) else None


def fetch(repository: Repository, paths: Collection[str]) -> Path:
    """Download these files and return the commit's folder. Raises like `look_up`, and EnvironmentFault if the disk has
    no room, which is checked before the download."""
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
        what = f"{size_text(needed)} have to be downloaded, but the cache's disk has only {size_text(free)} free"
        raise EnvironmentFault(
            Fault(repository.name, what, "make room, or set HF_HOME to a folder on a larger disk", code="SF-DISK-FULL")
        )


@contextmanager
def bounded_client() -> Iterator[None]:
    """Limit requests to the hub inside the block to `_PATIENCE` seconds; most have no limit by default."""
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
    """Silence the client's warnings, which repeat the faults, and its progress bars, which clutter logs."""
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
    """Turn errors of huggingface_hub inside the block into InputError (exit 2: name, revision, file) or
    EnvironmentFault (exit 3: access, network, disk). kind: model | dataset."""
    import httpx2
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError

    try:
        yield
    except (LocalEntryNotFoundError, RevisionResolutionError) as error:  # not cached either; the cause has the reason
        raise _fault(name, kind, revision, error.__cause__ or error) from None
    except (OSError, httpx2.HTTPError) as error:
        raise _fault(name, kind, revision, error) from None


def _fault(name: str, kind: str, revision: str | None, error: BaseException) -> SurefootError:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    local = f"give a local {'folder' if kind == 'model' else 'file'}"
    missing = "is not completely cached, and"
    if isinstance(error, HfHubHTTPError):
        return _refusal(name, kind, revision, error)
    if isinstance(error, OfflineModeIsEnabled):
        return _away(name, f"{missing} HF_HUB_OFFLINE is set", f"unset it to download the {NOUN[kind]}, or {local}")
    if isinstance(error, httpx2.TimeoutException):
        return _away(name, f"{missing} the hub does not answer in time", f"try again later, or {local}")
    if isinstance(error, httpx2.ConnectError | LocalEntryNotFoundError):
        return _away(name, f"{missing} the hub cannot be reached", f"check the network, or {local}")
    if isinstance(error, httpx2.TransportError):
        return _away(name, "the download was interrupted", "check the network and start again")
    return _away(name, f"cannot be downloaded: {_first_line(error)}", "check the network and the disk")


def _away(name: str, what: str, fix: str) -> EnvironmentFault:
    return EnvironmentFault(Fault(name, what, fix, code="SF-HUB-OFFLINE"))


def denied(name: str, what: str, fix: str) -> EnvironmentFault:
    """Fault for denied access to the repository `name`."""
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
        what = "the hub rejects the token: it is mistyped, expired or revoked"
        return denied(name, what, f"create one at https://huggingface.co/settings/tokens, then {_LOG_IN}")
    if gated:
        what = "is gated, and this account has no access: its terms were not accepted, or the request is pending"
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
    """Whether a token is stored, or set in the environment."""
    from huggingface_hub import get_token

    return get_token() is not None


def hub_obstacle() -> str:
    """Why nothing can be fetched now, or empty. Sends one request, with the token if there is one."""
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
        return "it rejects the stored token" if status == 401 else f"it answered {status}"
    return ""

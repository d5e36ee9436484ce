"""What the hub's refusals mean, in one line each, with the same words for models and data sets.

The hub says 401 and 403 for several things. With no token sent, it hides that a private repository exists; a token
that it does not know is an error of its own; a gated one is listed but not handed out. The reader is told which of
these it is. Nothing that the hub or its client wrote is repeated where it could hold a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.system.errors import EnvironmentFault, Fault, InputError, SurefootError
from surefoot.system.redaction import redacted

NOUN = {"model": "model", "dataset": "data set"}
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


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
    if isinstance(error, HfHubHTTPError):
        return _refusal(name, kind, revision, error)
    if isinstance(error, OfflineModeIsEnabled):
        what = "is not, or not wholly, in the cache, and HF_HUB_OFFLINE is set"
        return EnvironmentFault(
            Fault(name, what, f"unset it to download the {NOUN[kind]}, or {local}", code="SF-HUB-OFFLINE")
        )
    if isinstance(error, httpx2.TimeoutException):
        what = "is not, or not wholly, in the cache, and the hub does not answer in time"
        return EnvironmentFault(Fault(name, what, f"try again later, or {local}", code="SF-HUB-OFFLINE"))
    if isinstance(error, httpx2.ConnectError | LocalEntryNotFoundError):
        what = "is not, or not wholly, in the cache, and the hub cannot be reached"
        return EnvironmentFault(Fault(name, what, f"check the network, or {local}", code="SF-HUB-OFFLINE"))
    if isinstance(error, httpx2.TransportError):
        return EnvironmentFault(
            Fault(name, "the download broke off", "check the network and start again", code="SF-HUB-OFFLINE")
        )
    return EnvironmentFault(
        Fault(
            name, f"cannot be downloaded: {_first_line(error)}", "check the network and the disk", code="SF-HUB-OFFLINE"
        )
    )


def _refusal(name: str, kind: str, revision: str | None, error: object) -> SurefootError:
    from huggingface_hub import errors, get_token

    assert isinstance(error, errors.HfHubHTTPError)
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    status, signed_in = error.response.status_code, get_token() is not None
    gated = isinstance(error, errors.GatedRepoError)
    if gated and not signed_in:
        return EnvironmentFault(
            Fault(
                name, "is gated, and no token was sent", f"accept its terms at {page}, {_LOG_IN}", code="SF-HUB-ACCESS"
            )
        )
    if status == 401 and signed_in:
        what = "the hub does not accept the token that was sent: it is mistyped, expired or revoked"
        return EnvironmentFault(
            Fault(
                name, what, "make one at https://huggingface.co/settings/tokens, then " + _LOG_IN, code="SF-HUB-ACCESS"
            )
        )
    if gated:
        what = "is gated, and this account has no access: its terms are not accepted, or the request is still open"
        return EnvironmentFault(Fault(name, what, f"accept its terms at {page}", code="SF-HUB-ACCESS"))
    if isinstance(error, errors.RevisionNotFoundError):
        fix = f"see {page}/tree/main"
        return InputError(
            Fault(name, f"the {NOUN[kind]} has no revision {revision or 'main'!r}", fix, code="SF-HUB-MISSING")
        )
    if isinstance(error, errors.EntryNotFoundError):
        return InputError(
            Fault(name, f"the {NOUN[kind]} lacks a file that it lists", f"see {page}/tree/main", code="SF-HUB-MISSING")
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        open_to = "" if signed_in else "public "
        fix = "check the name" + ("" if signed_in else f"; if it is private, {_LOG_IN}")
        return InputError(Fault(name, f"the hub has no {open_to}{NOUN[kind]} of this name", fix, code="SF-HUB-MISSING"))
    if status == 403:
        return EnvironmentFault(
            Fault(name, "access is forbidden", "use a token that may read it: " + _LOG_IN, code="SF-HUB-ACCESS")
        )
    if status == 429:
        return EnvironmentFault(
            Fault(name, "the hub answered 429: too many requests", f"wait a little; {_LOG_IN}", code="SF-HUB-OFFLINE")
        )
    return EnvironmentFault(Fault(name, f"the hub answered {status}", "try again later", code="SF-HUB-OFFLINE"))


def _first_line(error: BaseException) -> str:
    return redacted((str(error) or type(error).__name__).splitlines()[0])

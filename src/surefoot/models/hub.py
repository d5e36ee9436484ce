"""From a model's name to a folder: a local one as it is, a hub id by way of Hugging Face's cache.

Only files that surefoot reads are fetched, pickled weights never. Tokens are left to huggingface_hub and appear in no
message. A hub that cannot be reached is no obstacle when the cache holds the files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import EnvironmentFault, Fault, InputError, SurefootError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_FACTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Not *.safetensors: some repositories hold the same weights twice, under consolidated.safetensors or original/.
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TIMEOUT = 4.0  # seconds until a silent hub counts as unreachable
_LOG_IN = "log in with `hf auth login`"


def resolve_folder(path: str, revision: str | None = None, *, weights: bool) -> Path:
    """The folder of a model. path: a folder, or a hub id such as org/name. weights: fetch those as well.

    Raises InputError for a folder that does not exist or a model or revision that the hub does not have,
    EnvironmentFault for a hub that cannot be reached or denies access.
    """
    if Path(path).is_dir():
        if revision is not None:
            raise InputError(
                Fault("model.revision", f"{path} is a folder, and only hub models have revisions", "leave it out")
            )
        return Path(path)
    if not _HUB_ID.fullmatch(path):
        raise InputError(
            Fault("model.path", f"folder {path} does not exist", "give a folder, or a hub id such as org/name")
        )
    return _download(path, revision, [*_FACTS, *(_WEIGHTS if weights else ())])


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():  # a bar redraws its line, which in a log is a mess
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, etag_timeout=_TIMEOUT))
    except HfHubHTTPError as error:
        raise _refused(name, revision, error) from None
    except LocalEntryNotFoundError as error:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise _refused(name, revision, cause) from None
        offline = isinstance(cause, OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        fix = "unset it to download the model" if offline else "check the network"
        what = f"is not, or not wholly, in the cache, and {why}"
        raise EnvironmentFault(Fault(name, what, f"{fix}, or give a local folder")) from None
    except (OSError, httpx2.HTTPError) as error:
        what = f"cannot be downloaded: {_first_line(error)}"
        raise EnvironmentFault(Fault(name, what, "check the network and the disk")) from None


def _refused(name: str, revision: str | None, error: HfHubHTTPError) -> SurefootError:
    """What the hub's answer means. It answers 401 both for private models and for those that do not exist."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"https://huggingface.co/{name}"
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        what = "is gated, and this account has no access"
        return EnvironmentFault(Fault(name, what, f"accept its terms at {page}, then {_LOG_IN}"))
    if isinstance(error, RevisionNotFoundError):
        return InputError(Fault("model.revision", f"{name} has no revision {revision!r}", f"see {page}/tree/main"))
    if status == 401:
        return EnvironmentFault(Fault(name, "is private or does not exist", f"check the name, then {_LOG_IN}"))
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return InputError(Fault("model.path", f"the hub has no model {name}", "check the name"))
    if status == 403:
        return EnvironmentFault(Fault(name, "access is forbidden", f"{_LOG_IN}, with a token that may read it"))
    return EnvironmentFault(Fault(name, f"the hub answered {status}", "try again later, or give a local folder"))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

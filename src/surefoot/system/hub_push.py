"""Upload files to a model repository on the hub: one commit, private by default. Nothing is ever deleted there.

Files are not pushed to an existing public repository unless `public` is given, so that nothing private becomes public
by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.hub import bounded_client, denied, hub_faults

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TOKENS = "https://huggingface.co/settings/tokens"


def require_right(name: str, *, public: bool) -> str:
    """Check with the hub, before training, that the files may be uploaded; writes nothing. Returns owner/name.

    name: owner/name, or a name in the account of the token.

    Raises InputError for an invalid name and for an existing public repository if `public` is not given;
    EnvironmentFault without a token, for a token without write access (not detectable for fine-grained tokens), and if
    the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        fix = "use letters, digits, - _ . and at most 96 characters, without --, .. and .git at the end"
        raise InputError(Fault(name, "is not a valid name for the hub", fix, code="SF-HUB-PUSH")) from None
    if get_token() is None:
        raise denied(name, "pushing needs a token, but none is set", "log in with `hf auth login`")
    api = HfApi()
    with hub_faults(name, "model", None), bounded_client():
        who = api.whoami()
        name = name if "/" in name else f"{who['name']}/{name}"
        _require_owner(name, who)
        _require_visibility(api, name, public)
    return name


def push_files(name: str, files: Mapping[str, Path | bytes], *, public: bool, message: str) -> str:
    """Create the repository if needed and commit the files; returns the address of the commit.

    files: path in the repository -> local file or content. Raises like `require_right`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    name = require_right(name, public=public)
    api = HfApi()
    with hub_faults(name, "model", None):
        try:
            api.create_repo(name, private=not public, exist_ok=True)
            operations = [CommitOperationAdd(path, content) for path, content in files.items()]
            return str(api.create_commit(name, operations, commit_message=message).commit_url)
        except HfHubHTTPError as error:
            if error.response.status_code == 403:
                raise _may_not_write(name) from None
            raise


def _require_owner(name: str, who: Mapping[str, Any]) -> None:
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    namespaces = {who["name"], *(one["name"] for one in who.get("orgs", []))}
    if role == "read" or name.partition("/")[0] not in namespaces:
        raise _may_not_write(name)


def _may_not_write(name: str) -> EnvironmentFault:
    fix = f"create one with write access at {_TOKENS}"
    return denied(name, "the token has no write access", fix)


def _require_visibility(api: HfApi, name: str, public: bool) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = api.model_info(name)
    except RepositoryNotFoundError:
        return
    if not public and not found.private:
        raise InputError(
            Fault(name, "exists and is public", "push to another name, or use --public", code="SF-HUB-PUSH")
        )

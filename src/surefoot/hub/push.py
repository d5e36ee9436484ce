"""Files into a model repository on the hub: one commit, private unless asked otherwise. Nothing is ever deleted there.

A repository that exists and is public is not pushed to unless `public` is given: what was meant to be private must not
appear in the open by a slip.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.hub.faults import hub_faults

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push_files(name: str, folder: Path, files: Sequence[str], *, public: bool, message: str) -> str:
    """Create the repository if need be and commit the files; returns the address of the commit.

    name: owner/name. files: relative to the folder. Raises InputError for a repository that is public against the
    request, EnvironmentFault without a token that may write there, and where the hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise EnvironmentFault(Fault(name, "pushing needs a token, and there is none", "log in with `hf auth login`"))
    api = HfApi()
    with hub_faults(name, "model", None):
        try:
            _require_visibility(api, name, public)
            api.create_repo(name, private=not public, exist_ok=True)
            operations = [CommitOperationAdd(file, str(folder / file)) for file in files]
            return str(api.create_commit(name, operations, commit_message=message).commit_url)
        except HfHubHTTPError as error:
            if error.response.status_code == 403:
                fix = "use a token with write access to it, from https://huggingface.co/settings/tokens"
                raise EnvironmentFault(Fault(name, "the token that was sent may not write there", fix)) from None
            raise


def _require_visibility(api: HfApi, name: str, public: bool) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = api.model_info(name)
    except RepositoryNotFoundError:
        return
    if not public and not found.private:
        raise InputError(Fault(name, "exists and is public", "push to another name, or give --public"))

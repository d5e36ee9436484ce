"""Whether this user can show the hub a token. The token itself stays with huggingface_hub."""

from __future__ import annotations


def is_signed_in() -> bool:
    """A token is stored, or set in the environment."""
    from huggingface_hub import get_token

    return get_token() is not None

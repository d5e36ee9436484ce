"""Whether the hub answers, and whether this user can show it a token. The token itself stays with huggingface_hub."""

from __future__ import annotations

_PATIENCE = 4.0  # seconds


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
        answer = get_session().get(constants.ENDPOINT + question, headers=build_hf_headers(), timeout=_PATIENCE)
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

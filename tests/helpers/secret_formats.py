"""Formats of secrets, independent of the patterns in `surefoot/system/redaction.py`.

Tokens: prefix, alphabet and length as in the rules of gitleaks (config/gitleaks.toml, read 2026-11-22) and on the
providers' pages. Names and notations: what HTTP, cloud tools, shells and Python print. If a format is not redacted, the
code is extended; no format is removed here.
"""

import random
import string

_ALNUM = string.ascii_letters + string.digits
_UPPER = string.ascii_uppercase + "234567"
_HEX = "0123456789abcdef"
_WIDE = _ALNUM + "_-"

SHAPES = {  # prefix, alphabet, how many characters of it
    "Hugging Face": ("hf_", string.ascii_letters, 34),
    "GitHub": ("ghp_", _ALNUM, 36),
    "GitHub app": ("ghs_", _ALNUM, 36),
    "GitHub fine-grained": ("github_pat_", _ALNUM + "_", 82),
    "GitLab": ("glpat-", _WIDE, 20),
    "GitLab runner": ("glrt-", _WIDE, 20),
    "OpenAI": ("sk-proj-", _WIDE, 74),
    "OpenAI, old": ("sk-", _ALNUM, 48),
    "Anthropic": ("sk-ant-api03-", _WIDE, 93),
    "NVIDIA": ("nvapi-", _WIDE, 64),
    "W&B": ("wandb_v1_", _ALNUM + "_", 40),
    "W&B, old": ("", _HEX, 40),
    "AWS": ("AKIA", _UPPER, 16),
    "AWS, temporary": ("ASIA", _UPPER, 16),
    "AWS, A3T": ("A3T", _UPPER, 17),
    "Google": ("AIza", _WIDE, 35),
    "Google OAuth": ("ya29.", _WIDE, 60),
    "Slack bot": ("xoxb-", string.digits + "-", 24),
    "Slack user": ("xoxp-", string.digits + "-", 40),
    "npm": ("npm_", _ALNUM, 36),
    "PyPI": ("pypi-AgEIcHlwaS5vcmc", _WIDE, 60),
    "Stripe": ("sk_live_", _ALNUM, 24),
    "Stripe, restricted": ("rk_live_", _ALNUM, 24),
    "SendGrid": ("SG.", _WIDE, 66),
    "Databricks": ("dapi", _HEX, 32),
    "DigitalOcean": ("dop_v1_", _HEX, 64),
    "Docker": ("dckr_pat_", _WIDE, 27),
    "Adobe": ("p8e-", string.ascii_lowercase + string.digits, 32),
    "age": ("AGE-SECRET-KEY-1", "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58),
    "Alibaba": ("LTAI", string.ascii_lowercase + string.digits, 20),
    "Artifactory": ("AKCp", _ALNUM, 69),
    "Atlassian": ("ATATT3", _ALNUM + "_-=", 186),
    "1Password": ("ops_eyJ", _ALNUM + "+/", 250),
    "JSON web token": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIi", _WIDE, 60),
}
LIKE_A_HASH = ("W&B, old",)  # bare, nothing tells it from a hash that a message is about: its name has to

NAMES = (
    "token", "hub_token", "hubToken", "HF_TOKEN", "api_key", "apiKey", "API-KEY", "x-api-key", "password", "passwd",
    "pwd", "passphrase", "secret", "client_secret", "clientSecret", "AWS_SECRET_ACCESS_KEY", "access_key",
    "accessKey", "wandb_key", "WANDB_API_KEY", "GITHUB_PAT", "SENTRY_DSN", "authorization", "Authorization",
    "Proxy-Authorization", "auth", "cookie", "Set-Cookie", "private_key", "AccountKey", "X-Amz-Security-Token",
    "X-Amz-Signature", "db_pass", "credentials", "session_id", "MLFLOW_TRACKING_PASSWORD", "webhook_url",
    "refresh_token", "access_token", "bearer", "jwt",
)  # fmt: skip
CONTEXTS = (
    "{name}={value}",
    "call failed: {name}={value}: try again",
    "{name} = {value}",
    "{name}: {value}",
    "curl -H '{name}: {value}' failed",
    '{{"a": 1, "{name}": "{value}", "b": 2}}',
    '{{"{name}":"{value}"}}',
    "{{'{name}': '{value}'}}",
    "{{'{name}': b'{value}'}}",
    '{name}="{value} and more"',
    "Config({name}='{value}', lr=1)",
    "GET https://host/path?a=1&{name}={value}&b=2",
    "GET https://host/path?{name}={value}",
    'text with \\"{name}\\": \\"{value}\\" escaped',
    "export {name}={value}",
    "--{name}={value}",
    "a:\n  {name}: {value}\n  b: 3",
    "env['{name}'] = '{value}'",
    "{name} => {value}",
)


def drawn(seed: int) -> dict[str, str]:
    """Return a random token of each format."""
    draws = random.Random(seed)
    return {
        shape: prefix + "".join(draws.choices(alphabet, k=length - 1)) + draws.choice(alphabet.rstrip("-=_+/") or "0")
        for shape, (prefix, alphabet, length) in SHAPES.items()
    }

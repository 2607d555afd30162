"""Secrets out of texts and settings that people will read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "*****"

# As Spark's own spark.redaction.regex, with the names of cloud storage credentials.
_SECRET = (
    r"secret|passw|\bpwd\b|token|credential|api[._-]?key|access[._-]?key|account[._-]?key|private[._-]?key"
    r"|encryption[._-]?key|connection[._-]?string|sas[._-]|signature|\bsig\b"
)
_SECRET_KEY = re.compile(_SECRET, re.I)
# The password of a URI: everything between its user and the last @ before the path; and its query's secrets.
_URI_PASSWORD = re.compile(r"(?P<start>\b[a-z][a-z0-9+.-]*://[^\s/?#:@'\"]*):[^\s/?#'\"]+@", re.I)
_URI_QUERY = re.compile(rf"(?P<start>[?&][\w.-]*(?:{_SECRET})[\w.-]*=)[^\s&'\"]+", re.I)
# Azure's connection strings.
_CONNECTION = re.compile(r"(?P<start>\b(?:AccountKey|SharedAccess(?:Key|Signature))=)[^;\s'\"]+", re.I)
_ASSIGNMENT = re.compile(
    rf"(?P<start>[\w.-]*(?:{_SECRET})[\w.-]*[\"']?\s*[:=]\s*)(?:\"[^\"]*\"|'[^']*'|[^\n,;&}}]+)", re.I
)
# A value of several lines: everything below the key that is indented more than it.
_BLOCK = re.compile(
    rf"^(?P<start>(?P<indent>[ ]*)(?:- )?[\"']?[\w.-]*(?:{_SECRET})[\w.-]*[\"']?[ ]*:[ ]*[|>][-+0-9]*[ ]*\n)"
    r"(?:(?:(?P=indent)[ ]+[^\n]*|[ ]*)(?:\n|\Z))+",
    re.I | re.M,
)


def is_secret(key: str) -> bool:
    """Whether the value of a setting of this name is to be kept from people's eyes.

    Example:
        >>> is_secret("spark.hadoop.fs.s3a.secret.key"), is_secret("spark.executor.memory")
        (True, False)
    """
    return _SECRET_KEY.search(key) is not None


def redacted(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings with the values of secret ones masked, and the secrets in URIs."""
    return {key: MASK if is_secret(key) else redact(value) for key, value in settings.items()}


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without these secrets, and without the passwords and keys in its URIs.

    Example:
        >>> redact("cannot read s3://AKIA:hush@bucket/x?secret_key=hush")
        'cannot read s3://AKIA:*****@bucket/x?secret_key=*****'
    """
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _CONNECTION.sub(rf"\g<start>{MASK}", text)
    if "://" not in text:
        return text
    return _URI_QUERY.sub(rf"\g<start>{MASK}", _URI_PASSWORD.sub(rf"\g<start>:{MASK}@", text))


def redact_settings(text: str) -> str:
    """The text of a configuration without the values of secret settings.

    Example:
        >>> redact_settings("conf: {spark.hadoop.fs.s3a.secret.key: hush, spark.app.name: x}")
        'conf: {spark.hadoop.fs.s3a.secret.key: *****, spark.app.name: x}'
    """
    text = _BLOCK.sub(lambda found: f"{found['start']}{found['indent']}  {MASK}\n", text)
    return _ASSIGNMENT.sub(_masked, redact(text))


def _masked(found: re.Match[str]) -> str:
    # The sign of a value that begins on the next line, which _BLOCK has masked, is not a value.
    sign = re.fullmatch(r"[|>][-+0-9]*\s*", found[0][len(found["start"]) :])
    return found[0] if sign else f"{found['start']}{MASK}"

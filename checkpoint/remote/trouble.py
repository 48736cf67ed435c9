"""What went wrong at a storage across the network, judged: gone, refused, expired or passing; and in words that hold no secret."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ..errors import CheckpointError


class Kind(Enum):
    """What there is to do about it."""

    MISSING = "missing"  # there is no such object
    EXPIRED = "expired"  # ask for fresh credentials, then again
    REFUSED = "refused"  # asking again does not help
    PASSING = "passing"  # asking again may help


@dataclass(frozen=True)
class Verdict:
    """One failure, judged."""

    kind: Kind
    words: str
    after_s: float | None = None
    """How long the server wants to be left alone."""


_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed", "InvalidToken"}
_MISSING = {"NoSuchKey", "NotFound", "404"}
_REFUSED = {"NoSuchBucket", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_BY_CLASS = {
    "NotFound": 404, "ResourceDoesNotExist": 404, "ResourceNotFoundError": 404, "Unauthenticated": 401, "PermissionDenied": 403,
    "BadRequest": 400, "InvalidParameterValue": 400, "AlreadyExists": 409, "TooManyRequests": 429, "TemporarilyUnavailable": 503,
    "NoCredentialsError": 403, "PartialCredentialsError": 403, "DefaultCredentialsError": 403, "InternalError": 500,
}  # fmt: skip


def judged(error: BaseException, environ: Mapping[str, str] = os.environ) -> Verdict:
    """What an exception of any client library means."""
    chain = _chain(error)
    status = next((s for e in chain if (s := _status(e))), 0)
    code = code_of(error)
    after = next((seconds for e in chain if (seconds := _retry_after(e)) is not None), None)
    what = code if code != str(status) else ""
    words = f"{f'{status} ' if status else ''}{what or type(chain[-1]).__name__}: {scrubbed(str(error), environ)}"
    if code in _EXPIRED or status == 401:
        return Verdict(Kind.EXPIRED, words, after)
    if code in _MISSING or (code not in _REFUSED and (status == 404 or isinstance(error, FileNotFoundError))):
        return Verdict(Kind.MISSING, words)
    if isinstance(error, CheckpointError | PermissionError | ValueError | TypeError | AttributeError | ImportError) or code in _REFUSED:
        return Verdict(Kind.REFUSED, words)
    if 400 <= status < 500 and status not in (408, 409, 425, 429):
        return Verdict(Kind.REFUSED, words)
    return Verdict(Kind.PASSING, words, after)


def code_of(error: BaseException) -> str:
    """The store's own word for what went wrong, if it gave one."""
    return next((code for e in _chain(error) if (code := _code(e))), "")


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def _response(error: BaseException) -> object:
    return getattr(error, "response", None)


def _status(error: BaseException) -> int:
    if type(error).__module__.startswith("aiohttp.http"):  # an answer that broke off: its "code" is not the server's
        return 0
    response = _response(error)
    if isinstance(response, Mapping):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    for owner in (error, response):
        for name in ("status_code", "code", "status"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return _BY_CLASS.get(type(error).__name__, 0)


def _code(error: BaseException) -> str:
    response = _response(error)
    code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else getattr(error, "error_code", None)
    return code if isinstance(code, str) else ""


def _retry_after(error: BaseException) -> float | None:
    response = _response(error)
    if isinstance(response, Mapping):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    value = getattr(error, "retry_after_secs", None)
    if isinstance(headers, Mapping):
        value = headers.get("retry-after", headers.get("Retry-After", value))
    try:
        return float(value) if value is not None else None
    except (TypeError, ValueError):
        return None


_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|KEY|SAS|CREDENTIAL|CONNECTION_STRING|SIGNATURE|AUTH", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s'\")>]+")
_BEARER = re.compile(r"(?i)((?:authorization[:=]\s*)?(?:bearer|basic|aws4-hmac-sha256)|authorization[:=])\s+\S+")
_USER = re.compile(r"://[^/\s@]+@")
_LEAST = 6


def scrubbed(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The first line of a text without what may be a secret: query strings, authorizations, values of variables that are named like one."""
    lines = text.strip().splitlines()
    line = lines[0] if lines else ""
    for name, value in environ.items():
        if len(value) >= _LEAST and _SECRET_NAME.search(name):
            line = line.replace(value, "***")
    return _USER.sub("://***@", _BEARER.sub(r"\1 ***", _QUERY.sub("?***", line)))[:300]

"""What must not be shown: secrets of the environment and of URIs, masked wherever a text is kept or printed.

`masked` is the one function for that. It knows what a secret looks like within a URI, and the values that were given to
`remember`: those of this process's environment (`settings.py` reads them) and of each tracking URI in use.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import parse_qsl, quote, unquote, urlsplit

MASK = "***"
SHORTEST = 4  # characters of a secret that is masked by its value: a shorter one would take half of every text with it

_WORDS = "password|passwd|pwd|passphrase|token|secret|api[_-]?key|access[_-]?key|credential|signature"
_USER_OF_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/\s?#]+@")
_OPTION_OF_URI = re.compile(
    rf"(?P<key>[?&;](?:[\w.-]{{0,40}}?(?:{_WORDS})[\w.-]{{0,40}}|key|sig|auth)=)[^&\s#'\";)]+", re.IGNORECASE
)
_NAME_OF_SECRET = re.compile(
    r"(?:^|_)(?:PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|APIKEY|KEY|CREDENTIALS?|AUTH_STRING)(?:_|$)", re.IGNORECASE
)
_known: frozenset[str] = frozenset()


def masked(text: str) -> str:
    """Return a text without what is secret in it.

    >>> masked("no answer from http://bob:pw@host/api?token=abc&page=2")
    'no answer from http://***@host/api?token=***&page=2'
    """
    text = _OPTION_OF_URI.sub(rf"\g<key>{MASK}", _USER_OF_URI.sub(rf"\g<scheme>{MASK}@", text))
    known = _pattern(_known)
    return text if known is None else known.sub(MASK, text)


def without_secrets(uri: str) -> str:
    """Return a URI without its user, password and secret options; it may be opened, if without them.

    >>> without_secrets("postgresql://me:secret@db/mlflow?sslmode=require&password=secret")
    'postgresql://db/mlflow?sslmode=require'
    """
    place, mark, options = _USER_OF_URI.sub(r"\g<scheme>", uri, count=1).partition("?")
    kept = "&".join(option for option in options.split("&") if not _OPTION_OF_URI.match(f"?{option}"))
    return f"{place}{mark}{kept}" if kept else place


def remember(*secrets: str) -> None:
    """Mask these values from now on, also as they are written in a URI."""
    global _known
    values = {form for secret in secrets for form in (secret, unquote(secret), quote(secret, safe=""))}
    _known |= {value for value in values if len(value) >= SHORTEST}


def secrets_of_uri(uri: str) -> tuple[str, ...]:
    """Return what is secret in a URI: its password (a user without one may be a token), and secret options.

    >>> secrets_of_uri("http://bob:hunter2@host?token=t0ken"), secrets_of_uri("http://mlflow:mlflow@host")
    (('hunter2', 't0ken'), ())
    """
    try:
        parts = urlsplit(uri)
        user, password = parts.username or "", parts.password
    except ValueError:
        return ()
    names = {user, parts.hostname or "", parts.path.strip("/"), parts.scheme}  # no secret, though used as one
    found = [password] if password else [user] if user and password is None and parts.scheme.startswith("http") else []
    found += [value for key, value in parse_qsl(parts.query) if _OPTION_OF_URI.match(f"?{key}=x")]
    return tuple(value for value in found if value not in names or (value == user and password is None))


def secrets_of(variables: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the secrets among variables: values whose name says so, and what is secret in URIs.

    >>> secrets_of([("MY_API_KEY", "sk-12345678"), ("TOKENIZERS_PARALLELISM", "false"), ("PAGER", "less")])
    ('sk-12345678',)
    """
    found = list[str]()
    for name, value in variables:
        if "://" in value:
            found += secrets_of_uri(value)
        elif _NAME_OF_SECRET.search(name) and len(value) >= 2 * SHORTEST:
            found.append(value)
    return tuple(found)


@lru_cache(maxsize=4)
def _pattern(known: frozenset[str]) -> re.Pattern[str] | None:
    if not known:
        return None
    longest_first = map(re.escape, sorted(known, key=lambda value: (-len(value), value)))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(longest_first)})(?![A-Za-z0-9])")


def mask_logs() -> None:
    """Mask what every log handler of this process writes from now on, tracebacks included."""
    loggers = [logging.getLogger(), *(log for log in logging.root.manager.loggerDict.values())]
    handlers = {h for log in loggers if isinstance(log, logging.Logger) for h in log.handlers}
    for handler in (*handlers, *((logging.lastResort,) if logging.lastResort is not None else ())):
        if _mask_record not in handler.filters:
            handler.addFilter(_mask_record)


def _mask_record(record: logging.LogRecord) -> bool:
    """Mask a record in place. Nobody's log is lost because its text cannot be made: that is the handler's to tell."""
    try:
        said = record.getMessage()
        if (shown := masked(said)) != said:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0] is not None:
            text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            if (shown := masked(text)) != text:
                record.exc_text, record.exc_info = shown, None
    except Exception:  # noqa: S110
        pass
    return True

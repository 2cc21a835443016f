"""Finds secrets in recorded text and takes them out.

The patterns know forms that issuers document (prefixes, PEM blocks) and places where a secret stands (an Authorization
header, a URL, an assignment in an environment file). A secret without form or place cannot be told from other text:
give its own pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ConfigError
from .json_values import parsed

__all__ = ["PATTERNS", "Redactor"]

# kind: pattern; where it has a group, the group is the secret and the rest stays.
PATTERNS: Mapping[str, str] = {
    "private_key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    "api_key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "gyre_key": r"\bgyre-[A-Za-z0-9_-]{32}\b",
    "github_token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "gitlab_token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "aws_key_id": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "google_key": r"\bAIza[A-Za-z0-9_-]{35}",
    "slack_token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "huggingface_token": r"\bhf_[A-Za-z0-9]{30,}",
    "stripe_key": r"\b[rs]k_live_[A-Za-z0-9]{20,}",
    "npm_token": r"\bnpm_[A-Za-z0-9]{36}\b",
    "pypi_token": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "jwt": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "authorization": r"(?i:authorization['\"\\]*\s*[:=]\s*['\"\\]*(?:bearer|basic|token)|\bbearer)\s+"
    r"([A-Za-z0-9._~+/=-]{16,})",
    "url_password": r"\b[a-z][a-z0-9+.-]*://[^/\s:@'\"]*:([^/\s@'\"]{3,})@",
    "assignment": r"\b[A-Z0-9_]*(?:SECRET|PASSWORD|PASSWD|TOKEN|API_KEY|ACCESS_KEY|PRIVATE_KEY)[A-Z0-9_]*\s*=\s*"
    r"[\\'\"]*([^\s'\"\\$]{8,})",
}

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


class Redactor:
    """Replaces what the patterns find by `[REDACTED:kind]`. `more` adds patterns, all of kind `custom`."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._patterns = [(kind, re.compile(pattern, re.DOTALL)) for kind, pattern in PATTERNS.items()]
        for pattern in more:
            try:
                self._patterns.append(("custom", re.compile(pattern, re.DOTALL)))
            except re.error as error:
                raise ConfigError(f"wanted a regular expression, got {pattern!r} ({error}); mend --pattern") from error

    def text(self, text: str) -> tuple[str, tuple[str, ...]]:
        """The text without its secrets, and their kinds, one entry each."""
        kinds: list[str] = []
        for kind, pattern in self._patterns:

            def take(match: re.Match[str], kind: str = kind) -> str:
                kinds.append(kind)
                whole, mark = match.group(), f"[REDACTED:{kind}]"
                if not match.re.groups or match.group(1) is None:
                    return mark
                start, end = match.start(1) - match.start(), match.end(1) - match.start()
                return whole[:start] + mark + whole[end:]

            text = pattern.sub(take, text)
        return text, tuple(kinds)

    def json(self, value: Any) -> tuple[Any, tuple[str, ...]]:
        """A JSON value without the secrets in its strings and keys, and their kinds."""
        if isinstance(value, str):
            return self.text(value)
        kinds: list[str] = []
        if isinstance(value, list):
            items = []
            for item in value:
                item, found = self.json(item)
                items.append(item)
                kinds += found
            return items, tuple(kinds)
        if isinstance(value, dict):
            named: dict[str, Any] = {}
            for key, item in value.items():
                key, in_key = self.text(key)
                named[key], in_item = self.json(item)
                kinds += [*in_key, *in_item]
            return named, tuple(kinds)
        return value, ()

    def blob(self, data: bytes) -> tuple[bytes, tuple[str, ...]]:
        """Stored bytes without secrets: a canonical JSON text, or a piece of a body that was cut anywhere."""
        try:
            value = parsed(data)
            if value is None:
                return self._piece(data)
            value, kinds = self.json(value)
        except RecursionError:
            return self._piece(data)
        if not kinds:
            return data, ()
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode(), kinds

    def _piece(self, data: bytes) -> tuple[bytes, tuple[str, ...]]:
        text = data.decode("utf-8", "surrogateescape")
        clean, kinds = self.text(text)
        # An escaped letter hides a secret from the patterns; what only shows when it is read is dropped as a whole.
        hidden = self.text(_ESCAPE.sub(lambda match: chr(int(match.group(1), 16)), clean))[1]
        if hidden:
            return b'"[REDACTED]"', (*kinds, *hidden)
        return (clean.encode("utf-8", "surrogateescape"), kinds) if kinds else (data, ())

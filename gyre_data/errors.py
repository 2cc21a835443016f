"""Every error that Gyre raises on purpose.

    GyreError
    ├── ConfigError      (ValueError)      a setting, flag or file the user gave cannot be used
    ├── DataError        (ValueError)      recorded data cannot be used
    │   ├── CorruptError                   bytes on disk are not what was written
    │   ├── SchemaError                    a table, column or version this release does not know
    │   └── AlignmentError                 arrays that must match in length, dtype or shape do not
    ├── CaptureError     (RuntimeError)    a call cannot be recorded exactly, so it must fail
    └── EngineError      (ConnectionError) an inference engine refused, failed or went away

A message says what was wanted, what came and what to do. All errors pickle.
"""

from __future__ import annotations

__all__ = [
    "AlignmentError",
    "CaptureError",
    "ConfigError",
    "CorruptError",
    "DataError",
    "EngineError",
    "GyreError",
    "SchemaError",
]


class GyreError(Exception):
    """Root of every deliberate error; the command line prints it as one line, without a traceback."""


class ConfigError(GyreError, ValueError):
    """A setting, flag or file the user gave cannot be used."""


class DataError(GyreError, ValueError):
    """Recorded data cannot be used for what was asked."""


class CorruptError(DataError):
    """Bytes on disk are not the bytes that were written."""


class SchemaError(DataError):
    """A table, column or format version that this release does not know."""


class AlignmentError(DataError):
    """Arrays that must match in length, dtype or shape do not; they are never padded into agreement."""


class CaptureError(GyreError, RuntimeError):
    """A model call cannot be recorded exactly, so it fails instead of being recorded wrongly."""


class EngineError(GyreError, ConnectionError):
    """An inference engine refused a request, failed, or went away."""

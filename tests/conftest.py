"""Shared fixtures: a scrubbed environment, so that a test never depends on who runs it, nor on how fast."""

import os

import pytest
from hypothesis import settings

# An example that is held up on a busy machine is no fault; Hypothesis gives each a fifth of a second.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_KEEP_PREFIXES = ("GYRE_TEST_", "PYTEST_")
_SCRUB = ("ANTHROPIC_", "OPENAI_", "GYRE_", "HF_", "CLAUDE_")


@pytest.fixture(autouse=True)
def _scrubbed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(_SCRUB) and not name.startswith(_KEEP_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")

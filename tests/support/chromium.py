"""A real Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium(sync_api: Any) -> Iterator[Any]:
    """A browser by playwright's `sync_api`; where GYRE_TEST_CHROMIUM names one, as in CI, it has to be there."""
    path = os.environ.get("GYRE_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine: apt-get install chromium, or name one in GYRE_TEST_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's own sandbox cannot start.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()

#!/usr/bin/env python3
"""Run the `gyre` command from a checkout that is not installed: `python cli.py --help`."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parent
sys.path[:0] = [str(root), str(root / "proxy")]

from gyre_data.main import run  # noqa: E402 - the path must be set first

if __name__ == "__main__":
    run()

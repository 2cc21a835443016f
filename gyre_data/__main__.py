"""`python -m gyre_data` is the `gyre` command."""

from .main import run

run()

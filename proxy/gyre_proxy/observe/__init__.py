"""Observe mode: a byte-exact pass-through to hosted APIs, recorded as a tree. Nothing here samples or tokenises."""

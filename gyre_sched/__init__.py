"""Elastic scheduling of cells between rollout and training. Standard library only; imports no other package.

`api` says what a policy sees, `actions` what it may ask for, `policies` holds those that ship, `simulate` runs one
before any GPU is spent, `invariants.check_policy` tells whether one is sound.
"""

"""Elastic scheduling of cells between rollout and training. Standard library only; imports no other package."""

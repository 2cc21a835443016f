"""Elastic scheduling of cells between rollout and training. Standard library only; imports none of the other packages."""

"""The policies that ship: two baselines, the elastic rule, and three that dispatch better."""

from .elastic import CarryOver, Cohort, Waterlevel
from .fixed import Async, Colocate

__all__ = ["Async", "CarryOver", "Cohort", "Colocate", "Waterlevel"]

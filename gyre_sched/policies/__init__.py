"""The policies that ship: two baselines, the elastic rule, and four that dispatch better."""

from .elastic import CarryOver, Cohort, Waterlevel
from .fixed import Async, Colocate
from .planner import Planner

__all__ = ["Async", "CarryOver", "Cohort", "Colocate", "Planner", "Waterlevel"]

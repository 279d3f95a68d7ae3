"""What things cost: bytes, seconds, links, budgets. Standard library only."""

from tapestream.costs.budget import Budget
from tapestream.costs.machine import Link, Machine
from tapestream.costs.profile import Profile, UniformStages
from tapestream.costs.stage import BlockCost, Carried, StageCost

__all__ = [
    "BlockCost", "Budget", "Carried", "Link", "Machine", "Profile", "StageCost", "UniformStages",
]  # fmt: skip

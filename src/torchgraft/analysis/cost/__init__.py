"""What a program costs: arithmetic, multiply-adds and bytes, per node, per module and in total, forward and backward.
`count.py` runs programs, `formulas.py` and `elementwise.py` know the operators, `report.py` the answer.
"""

from torchgraft.analysis.cost.count import cost
from torchgraft.analysis.cost.formulas import flop_formula
from torchgraft.analysis.cost.report import Cost, Work

__all__ = ["Cost", "Work", "cost", "flop_formula"]

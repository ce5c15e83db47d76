"""The J of each layer and node: the table of formulas, and the arguments of a rule.  Users add rules by `register_rule`."""

from autograd_hacks.formulas.call import Call, single_input
from autograd_hacks.formulas.table import RULES, Rule, positionwise, rule_for

__all__ = ["RULES", "Call", "Rule", "positionwise", "rule_for", "single_input"]

"""The J of each layer: the table of supported layers, and the arguments of a rule.  Users add rules by `register_rule`."""

from autograd_hacks.rules.rule import Call, Rule, positionwise, single_input
from autograd_hacks.rules.table import RULES, rule_for

__all__ = ["RULES", "Call", "Rule", "positionwise", "rule_for", "single_input"]

"""What J each layer has: the table of supported layers, and what a rule gets.  Users add rules by `register_rule`."""

from autograd_hacks.rules.rule import Call, Rule, positionwise, single_input
from autograd_hacks.rules.table import RULES, rule_for

__all__ = ["RULES", "Call", "Rule", "positionwise", "rule_for", "single_input"]

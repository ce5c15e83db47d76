"""What each layer's J is: the support list and what a rule sees.  `autograd_hacks.register_rule` is the user's way in."""

from autograd_hacks.rules.rule import Call, Rule, positionwise, single_input
from autograd_hacks.rules.table import RULES, rule_for

__all__ = ["RULES", "Call", "Rule", "positionwise", "rule_for", "single_input"]

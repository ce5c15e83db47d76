"""What each layer's J is.  `RULES` is the support list; `register_rule` is the user's way in."""

from autograd_hacks.rules.call import Call, Rule, single_input
from autograd_hacks.rules.table import RULES, is_supported, register_rule, rule_for

__all__ = ["RULES", "Call", "Rule", "is_supported", "register_rule", "rule_for", "single_input"]

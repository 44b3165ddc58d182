"""The rules of `rules_access` in CEL."""

from __future__ import annotations

from pd_operator.core import rules_access
from pd_operator.core.cel import Rule, rule


def auth_rules() -> list[Rule]:
    """Of `spec.router.auth`."""
    by_header = 'self.tenantFrom == "Header"'
    return [
        rule(f"!({by_header}) || has(self.gateway)", rules_access.GATEWAY_NEEDED, "gateway"),
        rule(f"{by_header} || !has(self.gateway)", rules_access.GATEWAY_ONLY, "gateway"),
        rule(f"!({by_header}) || !has(self.apiKeysSecretRef)", rules_access.KEYS_BY_GATEWAY, "apiKeysSecretRef"),
        rule('!has(self.apiKeysSecretRef) || self.anonymous != "Allowed"', rules_access.KEYS_ANONYMOUS, "anonymous"),
    ]


def gateway_rules() -> list[Rule]:
    """Of `spec.router.auth.gateway`."""
    return [rule("has(self.secretRef) || size(self.cidrs) > 0", rules_access.GATEWAY_EMPTY)]


def limit_rules() -> list[Rule]:
    """Of `spec.router.tenantLimits`."""
    return [rule("self.burst == 0 || self.requestsPerSecond > 0", rules_access.BURST, "burst")]

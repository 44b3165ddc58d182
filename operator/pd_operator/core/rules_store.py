"""Rules about the handle store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pd_operator.core.cel import Rule, rule
from pd_operator.core.choices import StoreType
from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem

VALKEY_NEEDED: Final = "is required with type Valkey: a url and a keySecretRef"
VALKEY_ONLY: Final = "may be set with type Valkey only"
PASSWORD_NEEDED: Final = "is required with username"
TLS_ONLY: Final = "may be set with a valkeys:// or rediss:// url only: without TLS no certificate is checked"


def handle_store(deployment: PDDeployment) -> Iterator[Problem]:
    """A server is named exactly when it is used, and what is said of it fits together."""
    store, path = deployment.spec.router.handle_store, "spec.router.handleStore.valkey"
    valkey = store.valkey
    if store.type is not StoreType.VALKEY:
        if valkey is not None:
            yield Problem(path, VALKEY_ONLY)
        return
    if valkey is None:
        yield Problem(path, VALKEY_NEEDED)
        return
    if valkey.username is not None and valkey.password_secret_ref is None:
        yield Problem(f"{path}.passwordSecretRef", PASSWORD_NEEDED)
    if valkey.ca_secret_ref is not None and not valkey.tls:
        yield Problem(f"{path}.caSecretRef", TLS_ONLY)


def store_rules() -> list[Rule]:
    """In CEL, of `spec.router.handleStore`."""
    return [
        rule('self.type != "Valkey" || has(self.valkey)', VALKEY_NEEDED, "valkey"),
        rule('self.type == "Valkey" || !has(self.valkey)', VALKEY_ONLY, "valkey"),
    ]


def valkey_rules() -> list[Rule]:
    """In CEL, of `spec.router.handleStore.valkey`."""
    return [
        rule("!has(self.username) || has(self.passwordSecretRef)", PASSWORD_NEEDED, "passwordSecretRef"),
        rule("!has(self.caSecretRef) || self.url.matches('^(valkeys|rediss)://')", TLS_ONLY, "caSecretRef"),
    ]


RULES = (handle_store,)

"""`spec.router.handleStore`: where handles wait for the next turn, and how routers share them."""

from __future__ import annotations

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import StoreType
from pd_operator.core.fields import SpecModel
from pd_operator.core.spec_engine import SecretKeyRef

MIB = 1 << 20


class ValkeyStore(SpecModel):
    """A Valkey or Redis server, 7.0 or newer, that all routers of the deployment use. The operator reads no Secret:
    routers mount those that are named here."""

    url: str = Field(
        min_length=1,
        max_length=fields.VALKEY_LENGTH,
        pattern=fields.VALKEY,
        description="valkey://HOST:PORT, or valkeys:// for TLS; redis:// and rediss:// mean the same. One server, or "
        "the Service of a primary: neither cluster mode nor Sentinel. /NUMBER at the end chooses a database.",
    )
    key_secret_ref: SecretKeyRef = Field(
        description="A secret of at least 16 random bytes. Tenants and ids are hashed with it, so that the server "
        "never sees them; routers with another one find none of the handles.",
    )
    username: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern=fields.SERVED_NAME,
        description="ACL user. Absent: the default user.",
    )
    password_secret_ref: SecretKeyRef | None = Field(
        default=None, description="The password; routers read it again for each connection."
    )
    ca_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Authorities of the server's certificate (PEM). Absent: those of the router's image."
    )
    timeout_milliseconds: int = Field(
        default=250,
        strict=True,
        ge=1,
        le=5000,
        description="For one operation; after it the turn goes on without a handle. While the server is down, turns do "
        "not wait for it at all.",
    )
    max_entry_bytes: int = Field(
        default=4 * MIB, strict=True, ge=1024, le=1 << 28, description="Longest handle that is kept."
    )

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.url.startswith(("valkeys://", "rediss://"))


class HandleStore(SpecModel):
    """Where handles wait for the next turn, and how many may wait."""

    type: StoreType = Field(
        default=StoreType.MEMORY,
        description="Memory: each router has its own, a turn that lands on another router is recomputed. Valkey: all "
        "routers share one. `pdctl up` has one router and always keeps them in memory.",
    )
    valkey: ValkeyStore | None = Field(default=None, description="The server. With type Valkey only.")
    max_bytes: int = Field(
        default=256 * MIB,
        strict=True,
        ge=MIB,
        le=1 << 36,
        description="Most bytes of handles that one router keeps in memory; the oldest go first. With type Valkey the "
        "server's maxmemory bounds them.",
    )
    max_entries: int = Field(
        default=100_000,
        strict=True,
        ge=1,
        le=100_000_000,
        description="Most handles that one router keeps in memory.",
    )

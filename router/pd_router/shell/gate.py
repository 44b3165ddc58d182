"""The door: every request's head passes here before its body is read.

Separate from `core.auth`, which decides, because here are the files that it decides by, and what an engine gets to see
of the credentials afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pd_router.core.access import Access
from pd_router.core.auth import (
    OPEN_PATHS,
    KeyTable,
    parse_engine_key,
    parse_keys,
    parse_networks,
    parse_secrets,
    tenant_by_gateway,
    tenant_by_key,
)
from pd_router.core.errors import ApiError
from pd_router.core.linking import tenant_of
from pd_router.core.settings import Tenancy
from pd_router.shell.watched_file import WatchedFile, read_text

log = logging.getLogger("pd_router.gate")


class Gate:
    """`admit` each request. Raises SettingsError for files that cannot be used."""

    def __init__(self, access: Access, tenancy: Tenancy, on_refused: Callable[[str], None]) -> None:
        self._access = access
        self._by_gateway = tenancy.source == "header"
        self._anonymous = tenancy.anonymous
        self._on_refused = on_refused
        self._networks = parse_networks(access.gateway_networks)
        self._keys: WatchedFile[KeyTable] | None = None
        self._secrets: WatchedFile[tuple[bytes, ...]] | None = None
        self._engine_key: WatchedFile[str] | None = None
        if path := access.api_keys_file:
            self._keys = WatchedFile(["--api-keys-file"], [path], lambda: parse_keys(read_text(access.api_keys_file)))
        if path := access.gateway_secret_file:
            self._secrets = WatchedFile(
                ["--gateway-secret-file"], [path], lambda: parse_secrets(read_text(access.gateway_secret_file))
            )
        if path := access.engine_api_key_file:
            self._engine_key = WatchedFile(
                ["--engine-api-key-file"], [path], lambda: parse_engine_key(read_text(access.engine_api_key_file))
            )
        self.forwards_credentials = self._keys is None and self._engine_key is None and not self._by_gateway
        """Whether engines see the client's Authorization: only where nobody else has judged it."""

    def files(self) -> list[WatchedFile[KeyTable] | WatchedFile[tuple[bytes, ...]] | WatchedFile[str]]:
        """All files that may change."""
        return [file for file in (self._keys, self._secrets, self._engine_key) if file is not None]

    def engine_authorization(self) -> str:
        """What the router itself shows engines, or ""."""
        return f"Bearer {self._engine_key.value}" if self._engine_key is not None else ""

    def admit(self, path: str, headers: dict[str, str], peer: str) -> str | None:
        """The tenant of a request; None gets no reuse. Takes out of `headers` what engines must not see.

        Raises:
            ApiError: 401 or 403.
        """
        try:
            tenant = None if path.partition("?")[0] in OPEN_PATHS else self._tenant(headers, peer)
        except ApiError as error:
            self._on_refused(error.code or "")
            raise
        if not self.forwards_credentials:
            headers.pop("authorization", None)
            if self._engine_key is not None:
                headers["authorization"] = self.engine_authorization()
        return tenant

    def _tenant(self, headers: dict[str, str], peer: str) -> str | None:
        if self._keys is not None:
            return tenant_by_key(headers, self._keys.value)
        if self._by_gateway:
            return tenant_by_gateway(
                headers,
                peer,
                secrets=self._secrets.value if self._secrets is not None else None,
                networks=self._networks,
                refuse=self._access.refuse_untrusted,
                anonymous=self._anonymous,
            )
        return tenant_of(headers, "authorization", self._anonymous)

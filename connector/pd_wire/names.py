"""Every name that two components must spell the same way: body fields, headers, labels, connector names.

Separate from the code that uses them so that a rename is one edit and a typo is an import error.
"""

from typing import Final

# --- request and answer bodies -----------------------------------------------------------------
KV_PARAMS: Final = "kv_transfer_params"
"""vLLM's field for the handle, in requests and answers."""

ID_FIELDS: Final = ("conversation_id", "session_id", "prompt_cache_key", "previous_response_id")
"""Body fields that may name a conversation, most specific first."""

ID_HEADERS: Final = ("x-conversation-id", "x-session-id")
"""Headers that may name a conversation (lower case), most specific first; a body field wins over a header."""

TENANT_HEADER: Final = "x-pd-tenant"
"""Set by a trusted gateway in front of the router, only honoured when the router is told to trust it."""

GATEWAY_SECRET_HEADER: Final = "x-pd-gateway-secret"
"""With it a gateway proves that it is the one to name tenants; never sent on."""

RANK_HEADER: Final = "x-data-parallel-rank"
"""vLLM's: which of its data-parallel ranks is to serve a request."""

# --- keys that our connector adds to a handle ---------------------------------------------------
OWN_PREFIX: Final = "pd_"
PROOF_KEY: Final = "pd_proof"
MODE_KEY: Final = "pd_mode"
REPORT_KEY: Final = "pd_report"
"""On P's answer only: what P did with the handle that it was given. See `pd_wire.report`."""

RETAIN_KEY: Final = "pd_retain"
"""Set to false by the router in the decode leg's params when no follow-up can use the blocks: D then frees at once."""

MODE_PINNED: Final = "Pinned"
"""The holder keeps the blocks for a fixed time; the first read ends that, so the handle is good for one send."""
MODE_UNPINNED: Final = "Unpinned"
"""The holder keeps nothing; the reader asks which blocks are still intact, and may do so any number of times."""
MODE_LEASED: Final = "Leased"
"""As Unpinned, and the holder keeps the blocks until a promise ends that the router can prolong."""
FALLBACK_KEY: Final = "pd_fallback"
"""Why the holder retains Pinned although it was told otherwise; absent otherwise."""
MOMENT_KEY: Final = "pd_moment"
"""In the Unpinned and Leased modes, when the turn ended. See `pd_wire.moment`."""
LEASE_KEY: Final = "pd_lease"
"""In the Leased mode, the promise; absent where the holder could not give one. See `pd_wire.lease`."""

LEASES_PATH: Final = "/pd/v1/leases"
"""A holder's endpoint: prolongs and ends leases. See `pd_connector.shell.lease_api`."""

# --- the vLLM plugin ---------------------------------------------------------------------------
CONNECTOR_CLASS: Final = "PDConnector"
CONNECTOR_MODULE: Final = "pd_connector.connector"
STOCK_CONNECTOR_CLASS: Final = "NixlConnector"
ROLE_PREFILL: Final = "prefill"
ROLE_DECODE: Final = "decode"
KV_ROLES: Final = {ROLE_PREFILL: "kv_producer", ROLE_DECODE: "kv_consumer"}

EXTRA_CONFIG_KEYS: Final = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "kv_recompute_threshold",
        "kv_lease_duration",
        "enforce_handshake_compat",
        "num_threads",
        "engine_ttl",
        "pd_retention",
        "pd_lease_seconds",
        "pd_lease_share",
    }
)
"""`kv_connector_extra_config` keys that vLLM's pull connector or ours reads; vLLM ignores any other key in silence."""

RETENTION_OPTION: Final = "pd_retention"
"""Ours: what becomes of a finished turn's blocks on decode, a mode."""
RETENTIONS: Final = (MODE_UNPINNED, MODE_PINNED, MODE_LEASED)
LEASE_SECONDS_OPTION: Final = "pd_lease_seconds"
"""Ours, with Leased: for how long a holder keeps a turn's blocks without being asked, in whole seconds."""
LEASE_SHARE_OPTION: Final = "pd_lease_share"
"""Ours, with Leased: the largest part of all blocks that leases may hold, 0 < share < 1."""

# --- Kubernetes --------------------------------------------------------------------------------
API_GROUP: Final = "pdserving.dev"
API_VERSION: Final = "v1alpha1"
KIND: Final = "PDDeployment"
LABEL_DEPLOYMENT: Final = f"{API_GROUP}/pddeployment"
LABEL_ROLE: Final = f"{API_GROUP}/role"
LABEL_GENERATION: Final = f"{API_GROUP}/generation"

SELF_TEST_CONTAINER: Final = "selftest"
SELF_TEST_REPORT: Final = "PD_SELF_TEST_REPORT"
"""Variable: the file to which a self-test that passed writes what it found, as one JSON object of texts."""

FOUND_VLLM: Final = "vllm"
FOUND_NIXL: Final = "nixl"
"""Keys of that object: versions."""

ENGINE_CONTAINER: Final = "engine"
"""Container of an engine pod whose start is the engine's start."""

HTTP_PORT: Final = "http"
"""Name of the port that takes requests, in engine and router pods."""

"""The module that vLLM loads: `kv_connector_module_path: pd_connector.connector`, `kv_connector: PDConnector`.

Importing it is what makes the plugin active in a process, so an import that fails must fail loudly: vLLM then stops and
never falls back to its own connector. The version is checked before anything of vLLM's connector is imported, so that
an unknown version is refused by name and not by an attribute that moved.
"""

from pd_connector import compat
from pd_connector.shell import stream

stream.arm(compat.require_supported(compat.installed_version()))

from pd_connector.shell.facade import PDConnector  # noqa: E402 - after the version check

__all__ = ["PDConnector"]

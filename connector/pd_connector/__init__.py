"""The vLLM plugin: what P and D add to vLLM's pull connector so that reading KV back from D is safe.

vLLM loads `pd_connector.connector`; start reading there. `compat` knows the vLLM versions, `core` decides on plain
values, `shell` hooks the decisions into vLLM.
"""

"""Creates one NIXL backend and exits: run as a process of its own by the self-test.

NIXL reads its log level when it is imported, writes the reason of a failure to standard error only, and some backends
end the process instead of raising.
"""

import sys


def main(backend: str) -> int:
    """0 when the backend was created, 1 when not; the text on standard output and error tells why."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("pd-connector-selftest", nixl_agent_config(backends=[backend]))
    if backend not in agent.backends:
        print(f"no plugin for {backend}; plugins found: {', '.join(sorted(agent.plugin_list)) or 'none'}")
        return 1
    print(f"memory types: {', '.join(sorted(agent.backend_mems.get(backend, [])))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

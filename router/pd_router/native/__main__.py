"""``python -m pd_router.native``: compile what is compiled, and say where it is."""

from __future__ import annotations

import sys

from pd_router.native import NotBuilt, build, load


def main() -> int:
    """Exit status: 0, or 1 when it can't be made."""
    try:
        path = build(*sys.argv[1:])
        load()
    except (NotBuilt, OSError) as error:
        print(f"pd_router.native: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tools.bring_up`: reports a missing package before anything starts, then runs command.py."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    try:
        import jinja2  # noqa: F401 - for the page, which is written last
        import plotly  # noqa: F401

        from tools.bring_up.command import main as start
    except ModuleNotFoundError as error:
        print(f"error: missing: {error.name}", file=sys.stderr)
        print("pip install it; for a machine without network, python -m tools.pack brings it", file=sys.stderr)
        return 2
    return start(argv)


if __name__ == "__main__":
    sys.exit(main())

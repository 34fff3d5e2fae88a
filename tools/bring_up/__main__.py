"""`python -m tools.bring_up`. Says what is missing before it imports anything that needs it; then command.py."""

import importlib.util
import sys
from collections.abc import Sequence

NEEDED = {  # module: the package that brings it
    "torch": "torch", "torchvision": "torchvision", "numpy": "numpy", "filelock": "filelock",
    "ruamel.yaml": "ruamel.yaml", "pydantic": "pydantic", "rich": "rich", "tensorboard": "tensorboard",
    "jinja2": "Jinja2",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    lacking = [package for module, package in NEEDED.items() if not _installed(module)]
    if lacking:
        print(f"error: missing: {', '.join(lacking)}", file=sys.stderr)
        print("pip install them; for a machine without network, python -m tools.pack brings them", file=sys.stderr)
        return 2
    from tools.bring_up.command import main as start

    return start(argv)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of ruamel, where there is no ruamel.yaml
        return False


if __name__ == "__main__":
    sys.exit(main())

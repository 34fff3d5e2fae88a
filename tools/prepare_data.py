"""Download CIFAR to a machine before the job, or take it from a local copy where there is no network.

    python -m tools.prepare_data --dataset cifar100 --data_path data
    python -m tools.prepare_data --dataset cifar100 --data_path data --from cifar-100-python.tar.gz
    python -m tools.prepare_data --dataset cifar100 --data_path /shared/data --stage /local/data

It writes the files of the official binary version, verified, in one rename: an interrupted or failed run leaves
nothing that could be taken for data, and two runs at once do the work once.
"""

import argparse
import sys
from pathlib import Path

from tools.command_line import new_parser
from utils.errors import exit_in_a_line

DATASETS = ("cifar10", "cifar100")


@exit_in_a_line
def main(argv: list[str] | None = None) -> int:
    """Prepare the data; returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        from tools.fetch_cifar import prepare
        from utils.data.cifar import VERSIONS  # here, since --help needs no numpy

        version = VERSIONS[arguments.dataset]
        print(prepare(version, arguments.data_path, arguments.source))
        if arguments.stage is not None:
            print(prepare(version, arguments.stage, arguments.data_path / version.folder))
    except KeyboardInterrupt:
        print("error: interrupted; nothing half-written is left. The same command starts again.", file=sys.stderr)
        return 130
    return 0


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    statuses = "0 done or already there; 2 usage; 3 bad input, no network or no room; 130 interrupted."
    parser = new_parser("prepare_data", __doc__, statuses)
    parser.add_argument("--dataset", required=True, choices=DATASETS)
    parser.add_argument("--data_path", required=True, type=Path, metavar="DIR", help="where the data will be")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="ARCHIVE_OR_FOLDER",
        help="a local tar.gz, tar or folder of the binary or the python version, instead of a download",
    )  # fmt: skip
    parser.add_argument("--stage", type=Path, metavar="NODE_LOCAL_DIR", help="copy to this folder too, for fast reads")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Download CIFAR before a job, or unpack its archive without a network; pack class folders into tar shards, or index
existing shards.

    python -m tools.prepare_data --dataset cifar100 --data_path data
    python -m tools.prepare_data --dataset cifar100 --data_path data --from cifar-100-python.tar.gz
    python -m tools.prepare_data --shards /shared/imagenet-shards --from /shared/imagenet
    python -m tools.prepare_data --shards /shared/imagenet-shards

Torchvision downloads and unpacks CIFAR. An archive must be an official one, of the python or the binary version, with
the published MD5. Data and shards appear in one rename: an interrupted or failed run leaves no partial data, and two
runs at once do the work once. Without --from, --shards writes the index of DIR/train/*.tar and DIR/val/*.tar, which
hold KEY.jpg (or .png, ...) and KEY.cls for each image, as in the webdataset package.
"""

import argparse
import sys

from tools.shared.command_line import at_least_one, new_parser, path_argument
from utils.errors import exit_in_a_line

DATASETS = ("cifar10", "cifar100")


@exit_in_a_line
def main(argv: list[str] | None = None) -> int:
    """Prepare the data; returns the exit status."""
    arguments = _parse_arguments(argv)
    if (folder := arguments.shards) is not None:
        from tools.shared.make_shards import index_shards, make_shards  # here, since --help needs no numpy

        if arguments.source is None:
            summary = index_shards(folder)
        else:
            summary = make_shards(folder, arguments.source, arguments.images_per_shard, arguments.num_shards)
        print(f"{folder}: {summary}")
        return 0
    from utils.data.datasets.cifar import VERSIONS, find_folder, read_cifar

    version, data_path = VERSIONS[arguments.dataset], arguments.data_path
    existed = find_folder(version, data_path)
    read_cifar(version, data_path, download=True, archive=arguments.source)
    print(f"{find_folder(version, data_path)}: {version.title} {'is already' if existed else 'is now'} there, verified")
    return 0


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    statuses = "0 done or already there; 2 usage; 3 bad input, no network or no room; 130 interrupted."
    parser = new_parser("prepare_data", __doc__, statuses)
    parser.add_argument("--dataset", choices=DATASETS, help="CIFAR: the version")
    parser.add_argument("--data_path", type=path_argument, metavar="DIR", help="CIFAR: the data folder")
    parser.add_argument(
        "--from", dest="source", type=path_argument, metavar="ARCHIVE_OR_FOLDER",
        help="CIFAR: unpack this official archive instead of a download; "
        "shards: pack this folder with train/CLASS/ and val/CLASS/",
    )  # fmt: skip
    parser.add_argument(
        "--shards", type=path_argument, metavar="DIR", help="the folder of shards to create, or to index"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--images_per_shard", type=at_least_one, metavar="N", help="images per shard (default: 4096)")
    size.add_argument(
        "--num_shards", type=at_least_one, metavar="N", help="number of training and of validation shards"
    )
    arguments = parser.parse_args(argv)
    sized = arguments.images_per_shard is not None or arguments.num_shards is not None
    if arguments.shards is None and (arguments.dataset is None or arguments.data_path is None or sized):
        parser.error("expected --dataset and --data_path, or --shards")
    if arguments.shards is not None and (arguments.dataset or arguments.data_path):
        parser.error("--shards takes no options of CIFAR; it takes --from, --images_per_shard or --num_shards")
    if sized and arguments.source is None:
        parser.error("--images_per_shard and --num_shards need --from; without it, shards are only indexed")
    return arguments


if __name__ == "__main__":
    sys.exit(main())

"""Download CIFAR before a job, or unpack its archive without a network; pack class folders into tar shards, or index
existing shards.

    python -m tools.prepare_data --dataset cifar100 --data_path data
    python -m tools.prepare_data --dataset cifar100 --data_path data --from cifar-100-python.tar.gz
    python -m tools.prepare_data --shards /shared/imagenet-shards --from /shared/imagenet
    python -m tools.prepare_data --shards /shared/imagenet-shards

Torchvision downloads and unpacks CIFAR. An archive must be the official one, with the published MD5; tar unpacks the
binary version, which is read too. Data and shards appear in one rename: an interrupted or failed run leaves no partial
data, and two runs at once do the work once. Without --from, --shards writes the index of DIR/train/*.tar and
DIR/val/*.tar, which hold KEY.jpg (or .png, ...) and KEY.cls for each image, as in the webdataset package.
"""

import sys

from tools.common import at_least_one, new_parser, path_argument
from utils.errors import exit_in_a_line

DATASETS = ("cifar10", "cifar100")


@exit_in_a_line
def main(argv: list[str] | None = None) -> int:
    """Prepare the data; returns the exit status."""
    statuses = "0 done or already there; 2 usage; 3 bad input, no network or no room; 130 interrupted."
    parser = new_parser("prepare_data", __doc__, statuses)
    parser.add_argument("--dataset", choices=DATASETS, help="CIFAR: the version")
    parser.add_argument("--data_path", type=path_argument, metavar="DIR", help="CIFAR: the data folder")
    source = "CIFAR: unpack this official archive instead of a download; shards: pack its train/CLASS/ and val/CLASS/"
    parser.add_argument("--from", dest="source", type=path_argument, metavar="ARCHIVE_OR_FOLDER", help=source)
    parser.add_argument("--shards", type=path_argument, metavar="DIR", help="the folder of shards to create or index")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--images_per_shard", type=at_least_one, metavar="N", help="images per shard (default: 4096)")
    size.add_argument("--num_shards", type=at_least_one, metavar="N", help="number of shards of each split")
    options = parser.parse_args(argv)
    folder, sized = options.shards, options.images_per_shard is not None or options.num_shards is not None
    if folder is None and (options.dataset is None or options.data_path is None or sized):
        parser.error("expected --dataset and --data_path, or --shards")
    if folder is not None and (options.dataset or options.data_path):
        parser.error("--shards takes no options of CIFAR; it takes --from, --images_per_shard or --num_shards")
    if sized and options.source is None:
        parser.error("--images_per_shard and --num_shards need --from; without it, shards are only indexed")
    if folder is not None:
        from tools.prepare_data.shards import index_shards, make_shards  # here, since --help needs no numpy

        made = (options.source, options.images_per_shard, options.num_shards)
        print(f"{folder}: {make_shards(folder, *made) if options.source else index_shards(folder)}")
        return 0
    from utils.data.datasets.cifar import VERSIONS, find_folder, read_cifar

    version, data_path = VERSIONS[options.dataset], options.data_path
    existed = find_folder(version, data_path)
    read_cifar(version, data_path, download=True, archive=options.source)
    print(f"{find_folder(version, data_path)}: {version.title} {'is already' if existed else 'is now'} there, verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())

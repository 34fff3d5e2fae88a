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

from tools.common import add_count, new_parser, path_argument
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
    add_count(parser, "--images_per_shard", 4096, "images of a new shard; ImageNet: 313 shards of 0.45 GB")
    options = parser.parse_args(argv)
    folder, source, cifar = options.shards, options.source, (options.dataset, options.data_path)
    if None in cifar if folder is None else cifar != (None, None):
        parser.error("expected either --dataset and --data_path, or --shards")
    if None in (folder, source) and options.images_per_shard != parser.get_default("images_per_shard"):
        parser.error("--images_per_shard needs --shards and --from; without --from, shards are only indexed")
    if folder is not None:
        from tools.prepare_data.shards import index_shards, make_shards  # here, since --help needs no numpy

        made = make_shards(folder, source, options.images_per_shard) if source else index_shards(folder)
        print(f"{folder}: {made}")
        return 0
    from utils.data.datasets.cifar import VERSIONS, find_folder, read_cifar

    version, data_path = VERSIONS[options.dataset], options.data_path
    existed = find_folder(version, data_path)
    read_cifar(version, data_path, download=True, archive=source)
    print(f"{find_folder(version, data_path)}: {version.title} {'is already' if existed else 'is now'} there, verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())

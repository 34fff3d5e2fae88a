"""Images per second that are read, not decoded, in an epoch's order: class folders and their shards, cold and warm.

python results/2026-11-22-shards/read_bytes.py FOLDERS SHARDS REPORT.json  # as root, who may drop the page cache
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from utils.data.folders import open_folders
from utils.data.image_files import EncodedImages
from utils.data.shards import open_shards

from tools.bench.common import as_json, measure
from tools.bench.loaders import drop_page_cache
from utils.data.sampling import epoch_order

NUMBER, THREADS, TRIALS = 5000, 2, 5


def main(folders: Path, shards: Path, report: Path) -> None:
    """Measure interleaved trials; each reads other images, first from the disk and then from memory."""
    places = {
        str(path): opened("imagenet", path, 32, 1.0).train
        for path, opened in ((folders, open_folders), (shards, open_shards))
    }
    epochs = dict.fromkeys(places, 0)

    def trial(name: str) -> dict[str, float]:
        images = places[name]
        assert isinstance(images, EncodedImages)
        epochs[name] += 1
        indices = epoch_order(0, epochs[name], len(images.labels))[:NUMBER].tolist()
        rates = {}
        drop_page_cache()
        for cache in ("cold", "warm"):
            with ThreadPoolExecutor(THREADS) as pool:
                started = time.perf_counter()
                num_bytes = sum(map(len, pool.map(images.content, indices, chunksize=64)))
                rates[cache] = NUMBER / (time.perf_counter() - started)
        return rates | {"bytes": num_bytes}

    results = measure({name: lambda name=name: trial(name) for name in places}, TRIALS)
    report.write_text(json.dumps(results, indent=1, default=as_json) + "\n")
    for name, values in results.items():
        print(name, *(f"{cache} {values[cache]:,.0f} images/s" for cache in ("cold", "warm")))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))

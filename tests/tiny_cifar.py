"""CIFAR in the official formats with a few records of noise, for the tests of what reads, verifies and writes it."""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import io
import pickle
import tarfile
import threading

import numpy as np

from utils.data.datasets import cifar

RECORDS_PER_FILE = 6


@dataclasses.dataclass(frozen=True)
class TinyCifar:
    """A version that expects these few records; the records by file name: uint8 [RECORDS_PER_FILE, record_bytes]; the
    files of torchvision's version, and their archive."""

    version: cifar.CifarVersion
    records: dict[str, np.ndarray]
    pickles: dict[str, bytes]
    archive: bytes

    def split(self, split):
        return np.concatenate([self.records[name] for name in split[0]])

    def write_binary(self, data_path):
        contents = {name: rows.tobytes() for name, rows in self.records.items()}
        return write_files(data_path / self.version.folder, contents)

    def write_python(self, data_path):
        return write_files(data_path / self.version.dataset_class.base_folder, self.pickles)


def write_files(folder, contents):
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def make_tiny_cifar(name, monkeypatch):
    """The records are noise, every label is allowed, and `load_dataset(name)` and torchvision expect exactly them."""
    official, rng = cifar.VERSIONS[name], np.random.default_rng(7)
    records, pickles, dataset_class = {}, {}, official.dataset_class
    label_keys = ["labels"] if official.label_bytes == 1 else ["coarse_labels", "fine_labels"]
    for file in (*official.train[0], *official.valid[0]):
        records[file] = rows = rng.integers(0, 256, (RECORDS_PER_FILE, official.record_bytes), np.uint8)
        rows[:, : official.label_bytes] %= 10
        labels = {key: rows[:, column].tolist() for column, key in enumerate(label_keys)}
        batch = {"data": rows[:, official.label_bytes :], **labels}
        pickles[file.removesuffix(".bin")] = pickle.dumps(batch, protocol=2)
    for list_name, split in (("train_list", official.train), ("test_list", official.valid)):
        names = [file.removesuffix(".bin") for file in split[0]]
        monkeypatch.setattr(dataset_class, list_name, [[file, md5(pickles[file])] for file in names])
    meta = dataset_class.meta
    pickles[meta["filename"]] = pickle.dumps({meta["key"]: list(official.class_names)}, protocol=2)
    monkeypatch.setattr(dataset_class, "meta", {**meta, "md5": md5(pickles[meta["filename"]])})
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for file, content in pickles.items():
            info = tarfile.TarInfo(f"{dataset_class.base_folder}/{file}")
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    monkeypatch.setattr(dataset_class, "tgz_md5", md5(packed.getvalue()))
    splits = (official.train[0], official.valid[0])
    train, valid = ((files, cifar.fingerprint(records[file] for file in files)) for files in splits)
    version = dataclasses.replace(official, train=train, valid=valid)
    monkeypatch.setitem(cifar.VERSIONS, name, version)
    return TinyCifar(version, records, pickles, packed.getvalue())


@contextlib.contextmanager
def serve(folder, monkeypatch):
    """The address at which this machine serves the files of `folder` to itself."""
    monkeypatch.setenv("no_proxy", "*")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()

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
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from utils.data.datasets import cifar
from utils.data.datasets.cifar import CifarSplit, CifarVersion, fingerprint

RECORDS_PER_FILE = 6


@dataclasses.dataclass(frozen=True)
class TinyCifar:
    """A version that expects these few records; the records by file name: uint8 [RECORDS_PER_FILE, record_bytes]."""

    version: CifarVersion
    records: dict[str, np.ndarray]

    def split(self, split: CifarSplit) -> np.ndarray:
        return np.concatenate([self.records[name] for name in split.files])

    def write_binary(self, data_path: Path) -> Path:
        folder = data_path / self.version.folder
        folder.mkdir(parents=True)
        for name, records in self.records.items():
            (folder / name).write_bytes(records.tobytes())
        return folder

    def write_python(self, data_path: Path) -> Path:
        """As torchvision keeps it. Pair with `publish_python`, which sets the checksums that torchvision expects."""
        folder = data_path / self.version.dataset_class.base_folder
        folder.mkdir(parents=True)
        for name, content in {**self.pickles(), **self.meta_pickle()}.items():
            (folder / name).write_bytes(content)
        return folder

    def pickles(self) -> dict[str, bytes]:
        label_keys = ["labels"] if self.version.label_bytes == 1 else ["coarse_labels", "fine_labels"]
        contents = {}
        for name, records in self.records.items():
            labels = {key: records[:, column].tolist() for column, key in enumerate(label_keys)}
            batch = {"data": records[:, self.version.label_bytes :], **labels}
            contents[name.removesuffix(".bin")] = pickle.dumps(batch, protocol=2)
        return contents

    def meta_pickle(self) -> dict[str, bytes]:
        meta = self.version.dataset_class.meta
        return {meta["filename"]: pickle.dumps({meta["key"]: list(self.version.class_names)}, protocol=2)}

    def python_archive(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """As torchvision downloads it, published: torchvision expects the checksums of the archive and its files."""
        self.publish_python(monkeypatch)
        files, dataset_class = {**self.pickles(), **self.meta_pickle()}, self.version.dataset_class
        make_archive(path, {f"{dataset_class.base_folder}/{name}": content for name, content in files.items()})
        monkeypatch.setattr(dataset_class, "tgz_md5", md5(path.read_bytes()))
        return path

    def publish_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torchvision expect the checksums of these pickles."""
        dataset_class = self.version.dataset_class
        for list_name, split in (("train_list", self.version.train), ("test_list", self.version.valid)):
            names = [name.removesuffix(".bin") for name in split.files]
            monkeypatch.setattr(dataset_class, list_name, [[name, md5(self.pickles()[name])] for name in names])
        (meta,) = self.meta_pickle().values()
        monkeypatch.setattr(dataset_class, "meta", {**dataset_class.meta, "md5": md5(meta)})


def make_tiny_cifar(name: str, monkeypatch: pytest.MonkeyPatch) -> TinyCifar:
    """The records are noise, every label is allowed, and `load_dataset(name)` expects exactly them."""
    official = cifar.VERSIONS[name]
    rng = np.random.default_rng(7)
    records = {}
    for file in (*official.train.files, *official.valid.files):
        noise = rng.integers(0, 256, (RECORDS_PER_FILE, official.record_bytes), np.uint8)
        noise[:, : official.label_bytes] = rng.integers(0, 10, (RECORDS_PER_FILE, official.label_bytes), np.uint8)
        records[file] = noise
    train, valid = (
        split._replace(fingerprint=fingerprint(records[file] for file in split.files))
        for split in (official.train, official.valid)
    )
    version = dataclasses.replace(official, train=train, valid=valid)
    monkeypatch.setitem(cifar.VERSIONS, name, version)
    return TinyCifar(version, records)


def make_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return path


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address at which this machine serves the files of `folder` to itself."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()

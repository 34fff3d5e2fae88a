"""Imports that the ranks of tests need, made once by the server that forks them (processes.py)."""

import importlib

for name in ("PIL.Image", "pytest", "torchvision", "train", "utils.distributed.ranks"):
    importlib.import_module(name)
from utils.data.datasets import dataset as datasets  # noqa: E402

datasets._generate_shapes_dataset()  # the shapes of most runs, in half a second

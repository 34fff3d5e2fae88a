"""What the ranks of tests need, imported once by the server that forks them (processes.py)."""

import functools

import PIL.Image
import pytest
import torchvision

import train
import utils.distributed.ranks
from utils.data.datasets import dataset as datasets

__all__ = ["PIL", "pytest", "torchvision", "train", "utils"]

datasets._generate_shapes_dataset = functools.cache(datasets._generate_shapes_dataset)
datasets._generate_shapes_dataset()  # the shapes of most runs, in half a second

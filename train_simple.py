"""The same job as `train.py --config=bs128` in plain lines, with no switches: read this first.

    python train_simple.py [--data_path ./data] [--epochs 100]

One process, float32, SGD, the tutorial's plateau schedule. train.py adds, each as a switch: mixed precision, NHWC,
fused updates, many ranks, warm-up, profiling, and what a long run needs: logs, checkpoints, resuming, a clean stop.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models import build_model
from utils.config import Config, load_config
from utils.data.augment import Normalise
from utils.data.datasets import Dataset, load_dataset
from utils.data.sampling import AugmentationRanges, EpochPlan
from utils.data.torchvision_loader import AugmentedImages, BatchSampler
from utils.distributed.world import choose_device
from utils.errors import exit_in_a_line


class Trainer:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = choose_device(config.device, local_rank=0)
        torch.backends.cudnn.allow_tf32 = False  # float32; PyTorch's default rounds to 10-bit mantissas

        # Images as bytes from disk, cut, flipped and rotated by torchvision in worker processes
        dataset = load_dataset(config.dataset, Path(config.data_path), download=True)
        self.sampler, self.train_loader = self.build_loader(dataset, training=True)
        _, self.valid_loader = self.build_loader(dataset, training=False)
        self.normalise = Normalise(config.cifar100_mean, config.cifar100_std, self.device, torch.contiguous_format)

        torch.manual_seed(config.seed)
        self.model = build_model(config).to(self.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.2, patience=10)
        self.criterion = nn.CrossEntropyLoss()

    def build_loader(self, dataset: Dataset, training: bool) -> tuple[BatchSampler, DataLoader[Any]]:
        arrays = dataset.train if training else dataset.valid
        plan = EpochPlan(
            num_samples=len(arrays.labels),
            batch_size=self.config.batch_size if training else self.config.valid_batch_size_per_gpu,
            rank=0,
            world_size=1,
            training=training,
            seed=self.config.seed,
            ranges=AugmentationRanges(crop_padding=4, horizontal_flip=True, rotation_angle=15) if training else None,
            limit=self.config.limit_train_batches if training else self.config.limit_valid_batches,
        )
        sampler = BatchSampler(plan)
        images = AugmentedImages(arrays, plan)
        return sampler, DataLoader(images, batch_size=None, sampler=sampler, num_workers=2, persistent_workers=True)

    def train(self) -> list[dict[str, float]]:
        history = []
        for epoch in range(self.config.max_epochs):
            start = time.perf_counter()
            train_loss = self.train_one_epoch(epoch)
            valid_loss, accuracy = self.validate_one_epoch()
            self.scheduler.step(valid_loss)
            history.append({"loss/train": train_loss, "loss/valid": valid_loss, "acc1/valid": accuracy})
            print(f"Time taken for epoch {epoch + 1} is {time.perf_counter() - start} sec, valid acc1={accuracy}")
        return history

    def train_one_epoch(self, epoch: int) -> float:
        self.model.train()
        self.sampler.epoch = epoch
        loss_sum, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for images, labels in self.batches(self.train_loader):
            self.optimizer.zero_grad()
            outputs = self.model(images)  # [N, 3, 32, 32] -> [N, 100]
            loss = self.criterion(outputs, labels)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * len(labels)
            count += len(labels)
        return loss_sum.item() / count

    @torch.no_grad()
    def validate_one_epoch(self) -> tuple[float, float]:
        self.model.eval()
        loss_sum, correct, count = 0.0, 0, 0
        for images, labels in self.batches(self.valid_loader):
            outputs = self.model(images)
            loss_sum += self.criterion(outputs, labels).item() * len(labels)
            correct += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
        return loss_sum / count, correct / count

    def batches(self, loader: DataLoader[Any]) -> Iterable[tuple[Tensor, Tensor]]:
        for images, labels, _ in loader:
            yield self.normalise(images.to(self.device)), labels.to(self.device)


@exit_in_a_line
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_path", default="./data", help="folder that holds CIFAR-100, fetched when missing")
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    overrides = [f"data_path={options.data_path}", f"max_epochs={options.epochs}"]
    Trainer(load_config(Path("config/cifar100.yaml"), "bs128", overrides)).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The training of `train.py --config=bs128` in plain PyTorch, with no switches: read this first.

    python train_simple.py [--data_path ./data] [--epochs 100]

One process, float32, SGD, the tutorial's plateau schedule. train.py adds, each as a switch: mixed precision, NHWC,
fused updates, several ranks, warm-up, profiling, and for long runs logs, checkpoints, resuming and a clean stop.
There, order and augmentation depend only on (seed, epoch, image); here they come from torch's generator.
"""

import argparse
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR100

from models import build_model
from models.config import ModelConfig

MEAN, STD = (0.5070752, 0.4865489, 0.4409178), (0.2673343, 0.2564385, 0.2761505)  # of CIFAR-100's training images
Batches = Iterable[tuple[Tensor, Tensor]]  # images [N, 3, 32, 32], labels [N]


class Trainer:
    """A network, its optimizer and its schedule."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        torch.backends.cudnn.allow_tf32 = False  # float32; PyTorch's default rounds to 10-bit mantissas
        torch.manual_seed(seed)
        self.device = device
        self.model = build_model(config).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.2, patience=10)
        self.criterion = nn.CrossEntropyLoss()

    def train(self, train_batches: Batches, valid_batches: Batches, epochs: int) -> None:
        for epoch in range(epochs):
            start = time.perf_counter()
            train_loss = self.train_one_epoch(train_batches)
            valid_loss, accuracy = self.validate_one_epoch(valid_batches)
            self.scheduler.step(valid_loss)
            print(f"Time taken for epoch {epoch + 1} is {time.perf_counter() - start} sec, valid acc1={accuracy}")
            print(f"train loss {train_loss:.4f}, valid loss {valid_loss:.4f}")

    def train_one_epoch(self, batches: Batches) -> float:
        self.model.train()
        loss_sum, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for images, labels in self.on_device(batches):
            self.optimizer.zero_grad(set_to_none=False)  # True is a switch of train.py: enable_extra_opts
            outputs = self.model(images)  # [N, 3, 32, 32] -> [N, 100]
            loss = self.criterion(outputs, labels)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * len(labels)
            count += len(labels)
        return loss_sum.item() / count

    @torch.no_grad()
    def validate_one_epoch(self, batches: Batches) -> tuple[float, float]:
        self.model.eval()
        loss_sum, correct, count = 0.0, 0, 0
        for images, labels in self.on_device(batches):
            outputs = self.model(images)
            loss_sum += self.criterion(outputs, labels).item() * len(labels)
            correct += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
        return loss_sum / count, correct / count

    def on_device(self, batches: Batches) -> Batches:
        for images, labels in batches:
            yield images.to(self.device), labels.to(self.device)


def build_loader(data_path: str, training: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    augmentation = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.RandomRotation(15)]
    to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    transform = transforms.Compose([*augmentation, *to_tensor] if training else to_tensor)
    images = CIFAR100(data_path, train=training, transform=transform, download=True)
    return DataLoader(images, 128, shuffle=training, drop_last=training, num_workers=2, persistent_workers=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_path", default="./data", help="holds cifar-100-python, downloaded if missing")
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(ModelConfig(model="resnet50", num_classes=100), device)
    train_loader = build_loader(options.data_path, training=True)
    trainer.train(train_loader, build_loader(options.data_path, training=False), options.epochs)


if __name__ == "__main__":
    main()

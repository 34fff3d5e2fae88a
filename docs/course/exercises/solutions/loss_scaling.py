"""A solution of exercises/loss_scaling.py."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Scaler:
    scale: float = 2.0**14
    growth_interval: int = 3
    good_steps: int = 0

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> bool:
        (loss * self.scale).backward()
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if finite:
            for gradient in gradients:
                gradient.div_(self.scale)
            optimizer.step()
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale, self.good_steps = self.scale * 2, 0
        else:
            self.scale, self.good_steps = self.scale / 2, 0
        optimizer.zero_grad()
        return finite

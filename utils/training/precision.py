"""AMP: the number formats of weights, forward pass and update, and the scale of the loss.

| level | weights | BatchNorm | forward | optimizer updates | loss scale |
|---|---|---|---|---|---|
| O0 | float32 | float32 | float32 | the weights | none |
| O1 | float32 | float32 | autocast | the weights | dynamic with fp16 |
| O2 | half | float32 | half | float32 master weights | dynamic with fp16 |
| O3 | half | half | half | the half-precision weights: the "speed of light", not meant to converge | none |

The levels are NVIDIA apex's, in plain PyTorch; half is fp16 or bf16 (`amp_dtype`). `enable_amp` means O1.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Level = Literal["O0", "O1", "O2", "O3"]
FORMAT_NAMES = {torch.float32: "float32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Precision:
    """One row of the table above, for one kind of device."""

    device_type: str
    level: Level = "O0"
    dtype: torch.dtype = torch.float32  # of the forward pass; half precision except in O0
    keep_batchnorm_fp32: bool = True  # O2, O3
    loss_scale: float | Literal["dynamic"] | None = None
    tf32: bool = False  # O0 on a GPU: products of float32 numbers with 10-bit mantissas
    remark: str = ""  # why enable_amp has no effect

    @property
    def casts_weights(self) -> bool:
        """Whether weights and images are in half precision, without autocast."""
        return self.level in ("O2", "O3")

    @property
    def number_format(self) -> str:
        """Number format of matrix products: float32, tf32, bf16 or fp16."""
        return "tf32" if self.tf32 else FORMAT_NAMES[self.dtype]

    def autocast(self) -> torch.autocast:
        """AMP: autocast context for the forward pass; does nothing except in O1."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.level == "O1")

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        """AMP: float32 images [N, 3, H, W] -> float32 logits [N, classes], computed in this precision."""
        with self.autocast():
            outputs: Tensor = model(images.to(self.dtype) if self.casts_weights else images)
        return outputs.float()

    def cast_weights(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """AMP: cast the model's weights to half precision in place for O2 and O3; BatchNorm may stay float32. Return
        {name: float32 master weight} of the cast weights for O2, {} for the other levels."""
        if not self.casts_weights:
            return {}
        float32 = {name: value.detach().clone() for name, value in model.named_parameters() if self.level == "O2"}
        model.to(self.dtype)
        for module in model.modules():
            if isinstance(module, _BatchNorm) and self.keep_batchnorm_fp32:
                module.float()
        return {
            name: nn.Parameter(float32[name], weight.requires_grad)
            for name, weight in model.named_parameters()
            if name in float32 and weight.dtype != torch.float32
        }

    def __str__(self) -> str:
        scale = "" if self.loss_scale is None else f", loss scale {self.loss_scale}"
        if self.level == "O0":
            return f"float32{scale}{self.remark}"
        half = FORMAT_NAMES[self.dtype]
        if self.level == "O1":
            return f"{half} autocast{scale}"
        batchnorm = "float32" if self.keep_batchnorm_fp32 else half
        master = ", float32 master weights" if self.level == "O2" else ""
        return f"{self.level}: {half} weights, {batchnorm} BatchNorm{master}{scale}"


class Weights:
    """A model's weights as the optimizer updates them. AMP: with O2, `masters` of the half-precision ones."""

    def __init__(self, model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
        self.model, self.masters = model, masters
        self._half_weights: list[Tensor] = [model.get_parameter(name) for name in masters]

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates, in the order of the model's parameters."""
        return [self.masters.get(name, parameter) for name, parameter in self.model.named_parameters()]

    def of_convolutions(self) -> list[nn.Parameter]:
        """The `parameters` that belong to convolutions."""
        convolutions = [module for module in self.model.modules() if isinstance(module, nn.Conv2d)]
        theirs = {id(parameter) for module in convolutions for parameter in module.parameters()}
        pairs = zip(self.model.parameters(), self.parameters(), strict=True)
        return [updated for own, updated in pairs if id(own) in theirs]

    def move_gradients_to_masters(self) -> None:
        """Move the half-precision weights' gradients to the master weights, after backward."""
        pairs = zip(self._half_weights, self.masters.values(), strict=True)
        if not (trained := [(half, master) for half, master in pairs if half.grad is not None]):
            return
        # reuse the memory: a captured CUDA graph zeroes these gradients
        gradients = [torch.empty_like(master) if master.grad is None else master.grad for _, master in trained]
        torch._foreach_copy_(gradients, [cast(Tensor, half.grad) for half, _ in trained])
        for (half, master), gradient in zip(trained, gradients, strict=True):
            half.grad, master.grad = None, gradient

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Set the model's half-precision weights to the rounded masters, after the optimizer's step."""
        if self.masters:
            torch._foreach_copy_(self._half_weights, list(self.masters.values()))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state with the masters instead of the half-precision weights."""
        masters = zip(self._half_weights, self.masters.values(), strict=True)
        by_weight = {id(half): master.detach() for half, master in masters}  # a tied weight has several names
        state = self.model.state_dict(keep_vars=True)
        return {name: by_weight.get(id(value), value.detach()) for name, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load model and masters from a state of any level."""
        self.model.load_state_dict(state)
        for name, master in self.masters.items():
            master.copy_(state[name])


class LossScaler(torch.amp.GradScaler):
    """PyTorch's scaler with apex's constant scale as an alternative to the dynamic one, and a count of skipped steps.
    Without a loss scale it only passes the step on to the optimizer.

    A fused optimizer skips an overflowed step on the device; for any other, the host waits for the device in each step.
    """

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"] | None) -> None:
        self.constant = None if loss_scale == "dynamic" or loss_scale is None else float(loss_scale)
        initial = 2.0**16 if self.constant is None else self.constant  # PyTorch's own default
        super().__init__(device_type, init_scale=initial, enabled=loss_scale is not None)
        self.skipped = torch.zeros((), device=device_type)  # steps, on the device

    def update(self, new_scale: float | Tensor | None = None) -> None:
        for state in self._per_optimizer_states.values() if self.is_enabled() else ():
            for found_inf in state["found_inf_per_device"].values():
                self.skipped += found_inf
        super().update(self.constant if new_scale is None else new_scale)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a step changes in place: scale, steps since its last change, skipped steps; {} if disabled."""
        if not self.is_enabled():
            return {}
        if self._scale is None:
            self.scale(torch.zeros((), device=self.skipped.device))  # creates them
        assert self._scale is not None and self._growth_tracker is not None
        return {"loss scale": self._scale, "growth tracker": self._growth_tracker, "skipped steps": self.skipped}

    def metrics(self) -> dict[str, float]:
        """Return {"loss_scale", "skipped_steps"}, {} if disabled; waits for the device."""
        if not self.is_enabled():
            return {}
        return {"loss_scale": self.get_scale(), "skipped_steps": self.skipped.item()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"skipped": self.skipped.item()} if self.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, except for a constant scale, which stays as configured."""
        if self.is_enabled():
            super().load_state_dict(state_dict if self.constant is None else state_dict | {"scale": self.constant})
            self.skipped.fill_(state_dict["skipped"])

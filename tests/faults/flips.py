"""Flip one bit of a chosen kind of tensor at a chosen moment of the training."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.errors import ConfigError
from utils.training.checks.step_state import Tensors, shared_tensors
from utils.training.checks.verify_steps import Verifier
from utils.training.learner import Learner
from utils.training.step import GraphedStep, TrainStep

IN_MEMORY = ("weight", "optimizer", "batch")  # flipped before the step reads them
IN_PYTHON = ("gradient", "activation")  # flipped during the step, which must not be captured or compiled
AT_REST = ("weight at rest", "optimizer at rest")  # flipped between two steps
KINDS = (*IN_MEMORY, *IN_PYTHON, *AT_REST)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


@dataclass(frozen=True)
class Flip:
    """One bit of a tensor of this kind, sampled from `seed`, on one rank, in one repetition of a step."""

    kind: str
    rank: int
    step: int  # number of earlier steps
    seed: str
    repetition: int = 1  # of a checked step: 1 or 2; flips at rest come before the first


@dataclass
class Flipper:
    """Applies one flip to a learner's training; `struck` then says where."""

    verifier: Verifier
    flip: Flip
    rank: int
    struck: str = ""
    passes: int = 0
    after_pass: Callable[[], None] = lambda: None
    report: Callable[[str], None] = lambda struck: None

    def __post_init__(self) -> None:
        self.learner = self.verifier.learner
        step = self.learner.step
        compiled = isinstance(step, TrainStep) and step.compiled_shapes is not None
        if self.flip.kind in IN_PYTHON and (isinstance(step, GraphedStep) or compiled):
            raise ConfigError(
                f"a flip of kind {self.flip.kind} needs a step that is neither captured nor compiled; set "
                "enable_cuda_graphs and enable_compile to false, or flip a weight, optimizer or batch"
            )
        self._random = random.Random(self.flip.seed)
        self._pass = self.learner.train_step
        self._step = self.verifier.train_step

    def __enter__(self) -> "Flipper":
        self.learner.train_step = self._train_a_pass  # type: ignore[method-assign]
        self.verifier.train_step = self._train_a_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.learner.train_step = self._pass  # type: ignore[method-assign]
        self.verifier.train_step = self._step  # type: ignore[method-assign]

    def _train_a_step(self, images: Tensor, labels: Tensor) -> None:
        self.passes = 0
        if self._is_now() and self.flip.kind in AT_REST:
            self._strike(self._choose(_state(self.learner, self.flip.kind.removesuffix(" at rest"))))
        self._step(images, labels)

    def _train_a_pass(self, images: Tensor, labels: Tensor) -> None:
        self.passes += 1
        now = self._is_now() and self.passes == self.flip.repetition
        kind = self.flip.kind
        if now and kind == "batch":
            self._strike(("images", images))
        elif now and kind in IN_MEMORY:
            self._strike(self._choose(_state(self.learner, kind)))
        handle = self._register_hook() if now and kind in IN_PYTHON else None
        self._pass(images, labels)
        if handle is not None:
            handle.remove()
        if self._is_now(1) and self.passes == self.flip.repetition:
            self.after_pass()

    def _is_now(self, more: int = 0) -> bool:
        return self.rank == self.flip.rank and self.learner.steps == self.flip.step + more

    def _register_hook(self) -> "torch.utils.hooks.RemovableHandle":
        """Register a hook that flips a bit of the next gradient or output of a random parameter or layer, once."""
        if self.flip.kind == "gradient":
            trained = [(name, p) for name, p in self.learner.model.named_parameters() if p.requires_grad]
            name, parameter = self._random.choice(trained)

            def flip_gradient(parameter: Tensor) -> None:
                if not self.struck and parameter.grad is not None:
                    self._strike((f"gradient {name}", parameter.grad))

            return parameter.register_post_accumulate_grad_hook(flip_gradient)
        layers = [(name, layer) for name, layer in self.learner.model.named_modules() if not list(layer.children())]
        name, layer = self._random.choice(layers)

        def flip_output(layer: nn.Module, inputs: object, output: Tensor) -> None:
            if not self.struck:
                self._strike((f"output of {name}", output))

        return layer.register_forward_hook(flip_output, prepend=True)  # before the hooks of a checked step

    def _choose(self, tensors: Tensors) -> tuple[str, Tensor]:
        if not tensors:
            raise ConfigError(f"there is no {self.flip.kind} to flip a bit of: this optimizer keeps no state yet")
        return self._random.choice(list(tensors.items()))

    def _strike(self, chosen: tuple[str, Tensor]) -> None:
        name, tensor = chosen
        number, bit = self._random.randrange(tensor.numel()), self._random.randrange(8 * tensor.element_size())
        flip_bit(tensor, number, bit)
        self.struck = f"bit {bit} of number {number} of {name}"
        self.report(f"flipped {self.struck} on rank {self.rank}, in step {self.flip.step + 1}")


def _state(learner: Learner, kind: str) -> Tensors:
    """Return the weights, or the optimizer's state."""
    weights = ("weight ", "master weight ")
    neither = ("average ", "loss scale", "growth tracker", "skipped steps")
    found = {name: tensor for name, tensor in shared_tensors(learner).items() if not name.startswith(neither)}
    return {name: tensor for name, tensor in found.items() if name.startswith(weights) == (kind == "weight")}


def flip_bit(tensor: Tensor, number: int, bit: int) -> None:
    """Flip one bit in memory, unnoticed by autograd. `number`: of the element, in the order of the memory."""
    width = 8 * tensor.element_size()
    flat = tensor.data.as_strided((tensor.numel(),), (1,)).view(INTEGERS[tensor.element_size()])
    mask = 1 << bit
    flat[number] ^= mask if width == 8 or bit < width - 1 else -mask  # all but bytes have a sign

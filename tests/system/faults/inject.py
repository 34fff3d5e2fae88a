"""Flip single bits, and count how many of them the checked steps (`verify_every_steps`) find.

    python -m tests.system.faults.inject --flips 1000 --clean 10000               # a campaign, on this process's device
    torchrun --nproc_per_node=4 -m tests.system.faults.inject --flips 1000 --clean 10000    # the same, over ranks
    python -m tests.system.faults.inject --strike weight --step 5 --set verify_every_steps=1  # a run with one flip

A campaign trains a tiny network with every step checked: first --clean steps without flips, then --flips flips, each in
a separate step that is undone. Kinds, ranks, tensors, elements and bits are sampled from --seed. To decide whether a
flip changed its step, all tensors of the result are compared with the same step without the flip; fingerprints are not
used. --strike trains the block like train.py, in a separate folder, with one flip.
"""

import os
import random
import re
import runpy
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from tools.common import add_count, as_settings, new_parser, print_table
from utils.config import load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.launch import find_launch
from utils.distributed.ranks import run_ranks
from utils.errors import ConfigError, CorruptionError, exit_in_a_line
from utils.program import TRAIN
from utils.training.learner import Learner
from utils.training.plan import make_plan
from utils.verify.verifier import Snapshot, Verifier, own_tensors, shared_tensors

KINDS = ("weight", "optimizer", "batch", "gradient", "activation")  # the last two need an eager step
SIDE = 16  # pixels of a campaign's images
COLUMNS = ("flips", "changed the step", "caught", "rank named", "changed nothing", "yet detected")
EXIT_STATUS = "0 no flip missed or misnamed and no false alarm, 1 otherwise; with --strike the status of training: 5"
CAMPAIGN = {
    "batch_size": 16, "verify_every_steps": 1, "deterministic": True, "lr_schedule": "constant",
    "lr": 0.01, "lr_warmup_epochs": 0, "enable_amp": False, "log_to_screen": False, "log_to_tensorboard": False,
}  # fmt: skip


@dataclass(frozen=True)
class Flip:
    """One bit of a tensor of this kind, sampled from `seed`, on one rank, in one repetition (1 or 2) of a step."""

    kind: str
    rank: int
    step: int  # number of earlier steps
    seed: str
    repetition: int = 1


def plan_flip(learner, flip, rank, after=lambda: None):
    """Let the learner meet a flip, until `del learner.train_step`; return a list that will get the flipped bit's place.
    `after` is called after the pass with the flip."""
    train, choose, struck, passes = learner.train_step, random.Random(flip.seed), [], 0

    def strike(name, tensor):
        if not struck:
            number, bit = choose.randrange(tensor.numel()), choose.randrange(8 * tensor.element_size())
            flip_bit(tensor, number, bit)
            struck.append(f"bit {bit} of number {number} of {name}")
        return tensor

    def train_a_pass(images, labels):
        nonlocal passes
        now = rank == flip.rank and learner.steps == flip.step
        passes += now
        if not now or passes != flip.repetition:
            train(images, labels)
            return
        handle = None
        if flip.kind == "batch":
            strike("images", images)
        elif flip.kind == "gradient":
            name, parameter = choose.choice(list(learner.model.named_parameters()))
            handle = parameter.register_hook(lambda gradient: strike(f"gradient {name}", gradient.clone()))
        elif flip.kind == "activation":
            name, layer = choose.choice([one for one in learner.model.named_modules() if not [*one[1].children()]])
            # before the hooks of a checked step
            handle = layer.register_forward_hook(lambda *call: strike(f"output {name}", call[-1]), prepend=True)
        elif tensors := list(state_of(learner, flip.kind).items()):
            strike(*choose.choice(tensors))
        else:
            raise ConfigError("there is no optimizer state to flip a bit of: this optimizer keeps none yet")
        train(images, labels)
        if handle is not None:
            handle.remove()
        after()

    learner.train_step = train_a_pass
    return struck


def state_of(learner, kind):
    """Return {name: tensor} of the weights, or of the optimizer's state."""
    weights, neither = ("weight ", "master weight "), ("average ", "loss scale", "growth tracker", "skipped steps")
    found = {name: tensor for name, tensor in shared_tensors(learner).items() if not name.startswith(neither)}
    return {name: tensor for name, tensor in found.items() if name.startswith(weights) == (kind == "weight")}


def flip_bit(tensor, number, bit):
    """Flip one bit in memory, unnoticed by autograd. `number`: of the element, in the order of the memory."""
    memory = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    memory[number * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def build_tiny(config, world):
    """Collective: build a learner of the smallest network with a layer of each kind, and the verifier of its steps."""
    learner = Learner(config, make_plan(config, world), lambda config: nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, config.num_classes),
    ), world, 1000)  # fmt: skip
    learner.model.train()
    return learner, Verifier(learner, world)


def random_batches(learner, world):
    """Yield batches of this rank forever: random images [N, 3, SIDE, SIDE] with random labels."""
    generator = torch.Generator().manual_seed(world.rank)
    batch = learner.plan.global_batch
    shape = (batch.accumulation * batch.micro_batch_size, 3, SIDE, SIDE)
    while True:
        labels = torch.randint(learner.config.num_classes, shape[:1], generator=generator)
        yield torch.rand(shape, generator=generator).to(world.device), labels.to(world.device)


def run_campaign(config, world, flips, clean, seed):
    """Collective: run `clean` checked steps, then `flips` flips, each in a checked step that is undone and trained
    again; return ({kind: counts by column}, problems)."""
    learner, verifier = build_tiny(config, world)
    counts, problems = {kind: Counter() for kind in KINDS}, []
    batches = random_batches(learner, world)
    for number in range(-clean, flips):
        batch = next(batches)
        if number >= 0:
            choose = random.Random(f"{seed} {number}")
            rank, repetition = choose.randrange(world.world_size), choose.choice((1, 2))
            flip = Flip(KINDS[number % len(KINDS)], rank, learner.steps, f"{seed} {number}", repetition)
            problems += flip_once(learner, verifier, flip, batch, counts[flip.kind])
        try:
            verifier.train_step(*batch)
        except CorruptionError as error:
            problems.append(f"false alarm: {error}")
    return counts, problems


def flip_once(learner, verifier, flip, batch, counts):
    """Collective: flip a bit in one checked step, then restore the state; return the problem, if any."""
    world, before, error = verifier.world, Snapshot(learner, batch), ""
    learner.train_step(*batch)
    expected, found = _bits_of_result(learner), {}
    before.restore()
    struck = plan_flip(learner, flip, world.rank, lambda: found.update(_bits_of_result(learner)))
    try:
        verifier.train_step(*batch)
    except CorruptionError as raised:
        error = str(raised)
    del learner.train_step
    before.restore()
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    differs = bool(found) and not same
    ranks = world.all_gather((differs, struck))
    named = [int(rank) for rank in re.findall(r"rank (\d+) \(", error)] == [flip.rank]
    counts.update(["flips"])
    if not any(differs for differs, _ in ranks):
        counts.update(["changed nothing"] + ["yet detected"] * bool(error))
        return []
    counts.update(["changed the step"] + ["caught"] * bool(error) + ["rank named"] * named)
    return [] if named else [f"{'misnamed' if error else 'missed'}: {flip}, {ranks[flip.rank][1]}: {error}"]


def _bits_of_result(learner):
    """Return a copy of the step's result as bytes: NaN equals itself, and 0 differs from -0."""
    result = shared_tensors(learner) | own_tensors(learner)
    return {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in result.items()}


def strike(options):
    """Run train.py in this process, as one of the ranks, with one flip; return its exit status."""
    launch = find_launch(os.environ)
    flip = Flip(options.strike, options.rank, options.step - 1, str(options.seed))
    train_step, flips = Learner.train_step, []

    def report():
        print(f"flipped {flips[-1][0]} on rank {flip.rank}, in step {options.step}", flush=True)

    def train_first_step(learner, images, labels):
        Learner.train_step = train_step
        flips.append(plan_flip(learner, flip, launch.rank, report))
        learner.train_step(images, labels)

    Learner.train_step = train_first_step
    choice = [f"--config={options.config}", f"--yaml_config={options.yaml_config}", f"--run-dir={options.run_dir}"]
    sys.argv = [str(TRAIN), *choice, "--resume=never", *(f"--set={setting}" for setting in options.set)]
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    if status == 0 and not any(flips) and launch.rank == min(options.rank, launch.world_size - 1):
        raise ConfigError(f"nothing was flipped: there was no step {options.step} on rank {options.rank}")
    return status


@exit_in_a_line
def main(argv=None):
    """Run a campaign, or train one run with a flip; return the exit status."""
    parser = new_parser("inject", __doc__, EXIT_STATUS)
    parser.prog = "python -m tests.system.faults.inject"
    add_config_arguments(parser, config="quickstart")
    add_count(parser, "--flips", 1000, "flips of a campaign")
    add_count(parser, "--clean", 1000, "checked steps of a campaign without flips")
    parser.add_argument("--seed", type=int, default=0, help="seed of the flips (default: 0)")
    parser.add_argument("--strike", choices=KINDS, metavar="KIND", help=f"train with one flip: {', '.join(KINDS)}")
    add_count(parser, "--step", 1, "step of --strike, counted from 1")
    parser.add_argument("--rank", type=int, default=0, metavar="RANK", help="rank of --strike (default: 0)")
    parser.add_argument("--run-dir", default="expts/inject", metavar="DIR", help="run's folder of --strike")
    options = parser.parse_args(argv)
    if options.strike:
        return strike(options)
    config = load_config(options.yaml_config, options.config, as_settings(CAMPAIGN) + options.set)
    problems = []

    def act(world):
        counts, found = run_campaign(config, world, options.flips, options.clean, options.seed)
        problems.extend(found)
        if world.is_main:
            rows = [(kind, *(str(found[column]) for column in COLUMNS)) for kind, found in counts.items()]
            title = f"single bit flips in checked steps, {world.world_size} rank(s)"
            print_table(title, ("kind of tensor", *COLUMNS), rows)
            print("\n".join([*problems, f"{len(problems)} flips missed or misnamed, or false alarms"]))

    return run_ranks(act, config.device, config.rank_timeout_seconds) or int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""Training settings: optimizer, schedule, recipe, precision, speed, verification."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from utils.base_config import Fraction, KeyFlag, PositiveFloat, PositiveInt, SharedConfig, as_yaml, split_number
from utils.distributed.config import DistributedConfig
from utils.user_code import OwnCode, TimmName, is_user_code

Auto = Literal["auto", True, False]
CpuKernel = Literal["winograd", "weight_products", "keep_memory"]
ExtraOpt = Literal["fused_optimizer", "zero_grad_set_to_none", "cudnn_benchmark"]
ExtraOptText = ExtraOpt | Annotated[str, Field(pattern=r"^cudnn_benchmark/[1-9]\d?$", title="cudnn_benchmark/N")]
HAVE_FUSED_KERNEL = ("sgd", "adamw")
MuonN = Annotated[str, Field(pattern=r"^muon/[1-9]$", title="muon/N")]
SqrtN = Annotated[str, Field(pattern=r"^sqrt/[1-9]\d{0,8}$", title="sqrt/N")]
LinearN = Annotated[str, Field(pattern=r"^linear/[1-9]\d{0,8}$", title="linear/N")]
PlateauN = Annotated[str, Field(pattern=r"^plateau/\d{1,9}$", title="plateau/N")]
ScheduleName = Literal["plateau", "onecycle", "cosine", "linear", "constant"] | PlateauN
ImageSize = Annotated[
    tuple[Annotated[int, Field(ge=8, le=1024)], Annotated[float, Field(gt=0, le=1)]], Field(strict=False)
]


class OptimizerConfig(SharedConfig):
    """optimizer"""

    optimizer: Annotated[Literal["sgd", "adamw", "muon"] | MuonN | OwnCode | TimmName, KeyFlag.FIXED_ON_RESUME] = "sgd"
    """sgd with momentum, adamw, muon, timm:NAME, or a function of your own. muon orthogonalises the updates of
    convolutions in 5 Newton-Schulz steps, muon/N in N, and trains all other parameters as adamw does. A usual lr is
    0.001 for adamw, 0.03 for muon."""
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Peak learning rate, before lr_scale_rule."""
    lr_scale_rule: Literal["none"] | SqrtN | LinearN = "none"
    """sqrt/128: multiply lr by the square root of batch_size / 128; linear/256: by batch_size / 256. The number is the
    global batch size at which lr applies unscaled. none: lr itself."""
    momentum: Fraction = 0.9
    """Momentum of sgd and muon; beta1 of adamw."""
    nesterov: bool = False
    """Nesterov momentum for sgd and muon."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 5e-4
    """L2 penalty; adamw and muon decouple it from the gradient."""
    weight_decay_bn_bias: Annotated[bool, KeyFlag.FIXED_ON_RESUME] = True
    """Decay BatchNorm weights and biases too, as the tutorial does."""
    clip_grad_norm: PositiveFloat | None = None
    """Clip the global gradient norm to this value; null: no clipping."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> "OptimizerConfig":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true, but momentum is 0; it needs momentum above 0")
        if self.nesterov and self.optimizer_kind not in ("sgd", "muon"):
            raise ValueError(f"nesterov is true, which optimizer {self.optimizer} does not have; use nesterov=false")
        return self

    @property
    def optimizer_kind(self) -> str:
        """`optimizer` without its number."""
        return split_number(self.optimizer)[0]

    @property
    def newton_schulz_steps(self) -> int:
        """Steps in which muon orthogonalises an update; the default is Jordan's."""
        return split_number(self.optimizer, default=5)[1]

    @property
    def peak_lr(self) -> float:
        """Learning rate after `lr_scale_rule`."""
        if self.lr_scale_rule == "none":
            return self.lr
        rule, reference = split_number(self.lr_scale_rule)
        return self.lr * (self.batch_size / reference) ** (0.5 if rule == "sqrt" else 1.0)


class ScheduleConfig(SharedConfig):
    """schedule"""

    max_epochs: PositiveInt = 100
    """Epochs to train."""
    validate_every_epochs: PositiveInt = 1
    """Validate once in this many epochs, and after the last one."""
    lr_schedule: ScheduleName | Annotated[tuple[PositiveInt, ...], Field(strict=False)] = "plateau"
    """Learning rate after the warm-up. plateau, the tutorial's, cuts it after more than 10 epochs without a better
    validation loss, plateau/N after more than N; the others are functions of the step. A list: cut it after these
    epochs."""
    lr_warmup_epochs: Annotated[float, Field(ge=0)] = 0
    """Linear warm-up over this many epochs; for onecycle, length of its rise. If the run is shorter, the warm-up
    ends with it, and onecycle rises for half of it."""
    lr_warmup_by: Literal["step", "epoch"] = "step"
    """Raise the warm-up rate at every step, or at every epoch as the tutorial does. epoch: all of epoch e of N trains
    at e/N of the peak."""
    lr_decay_factor: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """plateau, list of epochs: factor on the learning rate at each cut."""

    @property
    def schedule_kind(self) -> str:
        """`lr_schedule` without its number; step for a list of epochs."""
        return split_number(self.lr_schedule)[0] if isinstance(self.lr_schedule, str) else "step"

    @property
    def warmup_epochs(self) -> float:
        """`lr_warmup_epochs`; half of the run for onecycle, if its rise would not end within the run."""
        too_long = self.lr_schedule == "onecycle" and self.lr_warmup_epochs >= self.max_epochs
        return self.max_epochs / 2 if too_long else self.lr_warmup_epochs

    @property
    def plateau_patience(self) -> int:
        """Epochs without a better validation loss that plateau lets pass."""
        return split_number(str(self.lr_schedule), default=10)[1]

    @model_validator(mode="after")
    def _check_schedule(self) -> "ScheduleConfig":
        onecycle, epochs = self.lr_schedule == "onecycle", self.lr_warmup_epochs
        if onecycle and epochs == 0:
            raise ValueError("lr_warmup_epochs is 0; lr_schedule onecycle rises over it and needs a value above 0")
        if self.lr_warmup_by == "epoch" and (onecycle or epochs % 1):
            raise ValueError(f"lr_warmup_by epoch needs whole lr_warmup_epochs, not {epochs:g}, and no onecycle")
        if self.schedule_kind == "plateau" and self.validate_every_epochs > 1:
            why = f"needs validate_every_epochs 1, not {self.validate_every_epochs}, or another schedule"
            raise ValueError(f"lr_schedule {self.lr_schedule} follows the validation loss of every epoch: {why}")
        return self


class RecipeConfig(ScheduleConfig):
    """recipe"""

    label_smoothing: Fraction = 0.0
    """Fraction of the target spread over all classes, in training only."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Validate an exponential moving average of the weights with this decay per step; null: the weights themselves."""
    test_time_views: Literal[1, 2, 6] = 1
    """Test-time augmentation (TTA): average the validation outputs of 1, 2 or 6 views of each image. 2: the image and
    its mirror image; 6: also both shifted by one pixel to the lower right and to the upper left, with repeated border
    pixels."""
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """End the run at this validation accuracy in [0, 1]; null: train all epochs."""
    progressive_image_sizes: Annotated[tuple[ImageSize, ...], Field(strict=False)] = ()
    """[SIDE, FRACTION] pairs: train on images resized to SIDE pixels until FRACTION of max_epochs. After the last pair,
    and in validation, images have their full size; []: always. The fractions rise."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "RecipeConfig":
        sizes, fractions = self.progressive_image_sizes, [fraction for _, fraction in self.progressive_image_sizes]
        if fractions != sorted(set(fractions)):
            raise ValueError(f"progressive_image_sizes {as_yaml(sizes)}: expected pairs with rising fractions")
        return self


class PrecisionConfig(SharedConfig):
    """precision"""

    enable_amp: Auto = False
    """AMP: forward under autocast, loss in float32; auto: not in bf16 on a CPU or GPU without kernels for it."""
    amp_dtype: Literal["auto", "fp16", "bf16"] = "auto"
    """AMP: auto is the tutorial's fp16 on CUDA, and bf16 on a CPU with bf16 kernels. On a CPU without them (x86 without
    AVX-512) auto trains in float32, as bf16 would be ten times slower."""
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = None
    """AMP: apex's levels; null: O1 with enable_amp, else O0. O0 is float32, O1 autocast, O2 half-precision weights
    with float32 BatchNorm and master weights, O3 half precision throughout."""
    keep_batchnorm_fp32: bool | None = None
    """AMP: keep BatchNorm in float32 in O2 and O3; null: in O2 only."""
    loss_scale: Literal["dynamic"] | PositiveFloat | None = None
    """AMP: factor on the loss against fp16 underflow; null: dynamic for fp16 in O1 and O2, else none."""
    enable_tf32: bool = False
    """Compute float32 on NVIDIA's tensor cores with 10-bit mantissas (TF32). PyTorch's default for convolutions is
    true; here the baseline is float32."""


class SpeedConfig(OptimizerConfig, PrecisionConfig, DistributedConfig):
    """speed"""

    enable_extra_opts: bool | Annotated[tuple[ExtraOptText, ...], Field(strict=False)] = False
    """EXTRA: the tutorial's switch: true, or a list of fused_optimizer, zero_grad_set_to_none, cudnn_benchmark.
    fused_optimizer: one fused kernel for the whole update of sgd or adamw, except of half-precision weights (O3) on a
    CPU. zero_grad_set_to_none: drop gradients instead of writing zeros into them. cudnn_benchmark: let cuDNN time the
    first 10 convolution algorithms that it proposes, and use the fastest; cudnn_benchmark/N: the first N."""
    stem_channels: Literal[3, 4, 8] = 3
    """STEM: pad the input of the first convolution with zeros to this many channels; tensor cores take 4 or 8 at once.
    The network's parameters do not change."""
    fuse_norm_relu: Auto = False
    """FUSE: BatchNorm in training, shortcut and ReLU as one kernel. Triton on a GPU, C++ on a CPU. Needs
    enable_nhwc and an eager step; auto: on a CPU with a compiler, if these hold."""
    cpu_kernels: Literal["auto", False] | Annotated[tuple[CpuKernel, ...], Field(strict=False)] = False
    """CONV: faster work on a CPU: auto, or a list of winograd, weight_products, keep_memory. winograd: 3x3 convolutions
    by Winograd's method, with a C++ compiler. weight_products: weight gradients of other convolutions as matrix
    products. Both need enable_nhwc and an eager step. ALLOC: keep_memory leaves freed memory in the process, with
    glibc. auto: each where it works, the first two in bf16 only on a processor with bf16 kernels."""
    enable_compile: Auto = False
    """COMPILE: forward, loss and backward through torch.compile; auto: on CUDA with a compiler, not for dataparallel.
    A CPU gains nothing. Validation is compiled too in runs that validate enough images to pay for it."""
    enable_cuda_graphs: Auto = False
    """GRAPHS: capture the training step as a CUDA graph and replay it; auto: on CUDA, except for dataparallel. SGD and
    AdamW need the fused optimizer of enable_extra_opts, the others a step without loss scale (bf16, float32)."""
    enable_prefetch: Auto = False
    """PREFETCH: prepare the next batch on a second CUDA stream during the step; auto: on CUDA."""

    def extra_opt(self, name: ExtraOpt) -> bool:
        """Whether `enable_extra_opts` turns an optimisation on; true leaves out what the optimizer does not have."""
        if isinstance(self.enable_extra_opts, tuple):
            return any(split_number(opt)[0] == name for opt in self.enable_extra_opts)
        return self.enable_extra_opts and (name != "fused_optimizer" or self.optimizer in HAVE_FUSED_KERNEL)

    @property
    def cudnn_candidates(self) -> int:
        """Algorithms for a convolution that cudnn_benchmark times; the default is PyTorch's."""
        opts = self.enable_extra_opts if isinstance(self.enable_extra_opts, tuple) else ()
        return next((split_number(opt)[1] for opt in opts if "/" in opt), 10)

    def cpu_kernel(self, name: CpuKernel) -> bool | Literal["auto"]:
        """Whether `cpu_kernels` names a kernel; auto: where it works."""
        return self.cpu_kernels if isinstance(self.cpu_kernels, str | bool) else name in self.cpu_kernels

    @model_validator(mode="after")
    def _check_speed(self) -> "SpeedConfig":
        if self.extra_opt("fused_optimizer") and self.optimizer not in HAVE_FUSED_KERNEL:
            raise ValueError(f"enable_extra_opts has fused_optimizer, which optimizer {self.optimizer} does not have")
        layers = {f"cpu_kernels [{name}]": self.cpu_kernel(name) for name in ("winograd", "weight_products")}
        for key, asked in {"fuse_norm_relu": self.fuse_norm_relu, **layers}.items():
            if asked is True and not self.enable_nhwc:
                raise ValueError(f"{key} reads NHWC memory; it needs enable_nhwc true")
            if asked is True and self.enable_compile is True:
                raise ValueError(f"{key} is for eager steps; set it or enable_compile to false")
        if self.fuse_norm_relu is True and self.enable_sync_bn:
            raise ValueError("fuse_norm_relu has no BatchNorm over all ranks; set it or enable_sync_bn to false")
        autocast = self.opt_level == "O1" or (self.enable_amp and self.opt_level is None)
        if self.parallel == "dataparallel" and autocast and self.amp_dtype == "bf16":
            why = "the threads of dataparallel would compute in fp16"
            raise ValueError(f"amp_dtype bf16 with autocast needs parallel ddp or opt_level O2; {why}")
        return self


class VerifyConfig(SharedConfig):
    """verification"""

    verify_every_steps: Annotated[PositiveInt | None, KeyFlag.FREE_ON_RESUME] = None
    """Train one step in every N, and each start's first steps, twice; if a bit differs, stop and name the rank. null:
    never. A GPU needs deterministic. docs/reliability.md says which errors are found."""


class TrainingConfig(SpeedConfig, RecipeConfig, VerifyConfig):
    """All training settings."""

    @model_validator(mode="after")
    def _check_training(self) -> "TrainingConfig":
        if self.ema_decay is not None and self.opt_level in ("O2", "O3"):
            raise ValueError(f"ema_decay needs float32 weights; use opt_level O0 or O1, not {self.opt_level}")
        # dataparallel's GPUs run in threads
        for key in ("enable_cuda_graphs", "enable_compile", "fuse_norm_relu", "verify_every_steps"):
            if self.parallel == "dataparallel" and getattr(self, key) not in (False, None, "auto"):
                raise ValueError(f"{key} is set, but parallel is dataparallel, which cannot; use parallel ddp")
        if self.enable_cuda_graphs is False:
            return self
        asked = f"enable_cuda_graphs {str(self.enable_cuda_graphs).lower()}"
        if is_user_code(self.optimizer):
            raise ValueError(f"{asked} is for sgd, adamw and muon; optimizer {self.optimizer} needs false")
        if self.optimizer in HAVE_FUSED_KERNEL and not self.extra_opt("fused_optimizer"):
            why = f"without it PyTorch's {self.optimizer} reads the learning rate on the host"
            raise ValueError(f"{asked} needs enable_extra_opts true or [fused_optimizer]; {why}")
        return self

"""SyncBatchNorm's kernels, which PyTorch has for GPUs only, in plain operations. Images are [N, C, ...]."""

from typing import Any

import torch

aten = torch.ops.aten


def _per_channel(values, like):
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _sum(x):
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _stats(x, epsilon):
    """Return mean and 1 / standard deviation of this rank's images."""
    count = x.numel() // x.shape[1]
    mean = _sum(x) / count
    return mean, torch.rsqrt(_sum((x - _per_channel(mean, x)) ** 2) / count + epsilon)


def _gather_stats(x, means, invstds, running_mean, running_var, momentum, epsilon, counts):
    """Combine the statistics [R, C] of all ranks, of `counts` [R] numbers each; update the running statistics."""
    total, weights = counts.sum(), counts.view(-1, 1)
    mean = (means * weights).sum(0) / total
    var = ((invstds**-2 - epsilon + (means - mean) ** 2) * weights).sum(0) / total
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * total / (total - 1), momentum)
    return mean, torch.rsqrt(var + epsilon)


def _normalise(x, weight, bias, mean, invstd, epsilon):
    return (x - _per_channel(mean, x)) * _per_channel(invstd * weight, x) + _per_channel(bias, x)


def _reduce_gradient(gradient, x, mean, invstd, weight, *wanted):
    total = _sum(gradient)
    products = _sum(gradient * (x - _per_channel(mean, x)))
    return total, products, products * invstd, total.clone()


def _gradient(gradient, x, mean, invstd, weight, total, products, counts):
    count = counts.sum()
    along = (x - _per_channel(mean, x)) * _per_channel(invstd**2 * products / count, x)
    return (gradient - _per_channel(total / count, x) - along) * _per_channel(invstd * weight, x)


KERNELS: dict[Any, Any] = {
    aten.batch_norm_stats.default: _stats,
    aten.batch_norm_gather_stats_with_counts.default: _gather_stats,
    aten.batch_norm_elemt.default: _normalise,
    aten.batch_norm_backward_reduce.default: _reduce_gradient,
    aten.batch_norm_backward_elemt.default: _gradient,
}

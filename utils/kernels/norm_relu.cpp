// FUSE: the CPU kernels of norm_relu.py, over NHWC memory: rows are pixels, columns channels.
//
// Rows are split into parts by the sizes only, and the parts' sums are added in order, so every run gives the same bits
// with any number of threads. BLOCK rows are summed in float32, blocks and parts in float64.

#include "cpu_kernels.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t MAX_PARTS = 64, MIN_PART = 65536;  // MIN_PART numbers each
constexpr int64_t BLOCK = 64, GROUP = 4;  // rows; GROUP of them are added in registers first

inline float load(float value) { return value; }

inline float load(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    return read<float>(&bits);
}

inline void store(float value, float* to) { *to = value; }

inline void store(float value, bfloat16* to) {
    to->bits = static_cast<uint16_t>(round_to_bfloat16(read<uint32_t>(&value)));
}

// Add rows' distances from `level`, and their squares, to `sum` and `squares` [channels].
template <int64_t rows, typename T>
inline void add_rows(const T* __restrict x, const float* __restrict level, int64_t channels, float* __restrict sum,
                     float* __restrict squares) {
    for (int64_t c = 0; c < channels; ++c) {
        float total = 0, square = 0;
#pragma GCC unroll 4
        for (int64_t row = 0; row < rows; ++row) {
            const float distance = load(x[row * channels + c]) - level[c];
            total += distance;
            square += distance * distance;
        }
        sum[c] += total;
        squares[c] += square;
    }
}

struct Sums {
    std::vector<double> totals, products;  // [channels]
};

// Two sums over all pixels: `add(first, last, sum, product)` adds these rows to a block's sums [channels].
template <typename Add>
Sums sum_rows(int64_t parts, int64_t pixels, int64_t channels, Add add) {
    Sums sums{std::vector<double>(parts * channels), std::vector<double>(parts * channels)};
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
        std::vector<float> sum(channels), product(channels);
        const int64_t end = (part + 1) * pixels / parts;
        for (int64_t first = part * pixels / parts; first < end; first += BLOCK) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            std::fill(product.begin(), product.end(), 0.0f);
            add(first, std::min(first + BLOCK, end), sum.data(), product.data());
            for (int64_t c = 0; c < channels; ++c) {
                sums.totals[part * channels + c] += sum[c];
                sums.products[part * channels + c] += product[c];
            }
        }
    }
    for (int64_t part = 1; part < parts; ++part)
        for (int64_t c = 0; c < channels; ++c) {
            sums.totals[c] += sums.totals[part * channels + c];
            sums.products[c] += sums.products[part * channels + c];
        }
    return sums;
}

int64_t count_parts(int64_t pixels, int64_t channels) {
    return std::clamp<int64_t>(pixels * channels / MIN_PART, 1, std::min(MAX_PARTS, pixels));
}

// The same expression in forward and backward, so that ReLU's mask is the same.
inline float normalised(float x, float mean, float scale, float bias) { return (x - mean) * scale + bias; }

template <bool added, typename T>
void forward(const T* x, const T* shortcut, const float* weight, const float* bias, float* running_mean,
             float* running_var, float* mean, float* invstd, T* out, int64_t pixels, int64_t channels, double momentum,
             double eps) {
    // The first block's mean: subtracted before squaring, so that the difference of two large sums loses no digits.
    std::vector<float> level(channels), scale(channels);
    const auto add = [&](int64_t first, int64_t last, float* sum, float* squares) {
        for (; first + GROUP <= last; first += GROUP)
            add_rows<GROUP>(x + first * channels, level.data(), channels, sum, squares);
        for (; first < last; ++first) add_rows<1>(x + first * channels, level.data(), channels, sum, squares);
    };
    const int64_t block = std::min(BLOCK, pixels);
    const Sums of_block = sum_rows(1, block, channels, add);
    for (int64_t c = 0; c < channels; ++c)
        level[c] = static_cast<float>(of_block.totals[c] / static_cast<double>(block));
    const Sums sums = sum_rows(count_parts(pixels, channels), pixels, channels, add);
    const double count = static_cast<double>(pixels);
    for (int64_t c = 0; c < channels; ++c) {
        const double distance = sums.totals[c] / count, middle = level[c] + distance;
        const double variance = std::max(sums.products[c] / count - distance * distance, 0.0);
        mean[c] = static_cast<float>(middle);
        invstd[c] = static_cast<float>(1 / std::sqrt(variance + eps));
        scale[c] = invstd[c] * weight[c];
        running_mean[c] = static_cast<float>((1 - momentum) * running_mean[c] + momentum * middle);
        running_var[c] =
            static_cast<float>((1 - momentum) * running_var[c] + momentum * variance * (count / (count - 1)));
    }
    const float* scales = scale.data();
#pragma omp parallel for schedule(static)
    for (int64_t pixel = 0; pixel < pixels; ++pixel)
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
            const int64_t at = pixel * channels + c;
            float value = normalised(load(x[at]), mean[c], scales[c], bias[c]);
            if (added) value += load(shortcut[at]);
            store(value < 0 ? 0 : value, out + at);
        }
}

// The gradient through ReLU, whose mask is read off the output with a shortcut, else recomputed from the input.
template <bool added, typename T>
inline float passed(T gradient, T x, T out, float mean, float scale, float bias) {
    const float incoming = load(gradient);  // unconditionally: a conditional load is not vectorised
    return (added ? load(out) : normalised(load(x), mean, scale, bias)) > 0 ? incoming : 0.0f;
}

template <bool added, typename T>
void backward(const T* gradient, const T* x, const T* out, const float* weight, const float* bias,
              const float* mean, const float* invstd, T* grad_x, T* grad_shortcut, float* grad_weight,
              float* grad_bias, int64_t pixels, int64_t channels) {
    std::vector<float> levels(channels), slopes(channels), scales(channels);
    float *level = levels.data(), *slope = slopes.data(), *scale = scales.data();
    for (int64_t c = 0; c < channels; ++c) scale[c] = invstd[c] * weight[c];
    // sums of the gradient through ReLU, and of it times x - mean; with a shortcut it is the shortcut's gradient
    const Sums sums = sum_rows(
        count_parts(pixels, channels), pixels, channels, [=](int64_t first, int64_t last, float* sum, float* product) {
            for (int64_t row = first; row < last; ++row)
#pragma omp simd
                for (int64_t c = 0; c < channels; ++c) {
                    const int64_t at = row * channels + c;
                    const float value = passed<added>(gradient[at], x[at], out[at], mean[c], scale[c], bias[c]);
                    sum[c] += value;
                    product[c] += value * (load(x[at]) - mean[c]);
                    if (added) store(value, grad_shortcut + at);
                }
        });
    const double count = static_cast<double>(pixels);
    for (int64_t c = 0; c < channels; ++c) {
        const double total = sums.totals[c], product = sums.products[c];
        grad_bias[c] = static_cast<float>(total);
        grad_weight[c] = static_cast<float>(product * invstd[c]);
        level[c] = static_cast<float>(total / count);
        slope[c] = static_cast<float>(product * invstd[c] * invstd[c] / count);
    }
#pragma omp parallel for schedule(static)
    for (int64_t pixel = 0; pixel < pixels; ++pixel)
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
            const int64_t at = pixel * channels + c;
            const float value = added ? load(grad_shortcut[at])
                                      : passed<false>(gradient[at], x[at], x[at], mean[c], scale[c], bias[c]);
            store((value - level[c] - (load(x[at]) - mean[c]) * slope[c]) * scale[c], grad_x + at);
        }
}

}  // namespace

// The kernels' addresses, with a shortcut and without.
extern "C" const auto forward_float32 = &forward<false, float>;
extern "C" const auto forward_bfloat16 = &forward<false, bfloat16>;
extern "C" const auto backward_float32 = &backward<false, float>;
extern "C" const auto backward_bfloat16 = &backward<false, bfloat16>;
extern "C" const auto forward_added_float32 = &forward<true, float>;
extern "C" const auto forward_added_bfloat16 = &forward<true, bfloat16>;
extern "C" const auto backward_added_float32 = &backward<true, float>;
extern "C" const auto backward_added_bfloat16 = &backward<true, bfloat16>;

// FUSE: the CPU kernels of module.py, over NHWC memory: rows are pixels, columns channels.
//
// Rows are split into parts by the sizes only, and the parts' sums are added in order, so every run gives the same bits
// with any number of threads. BLOCK rows are summed in float32, blocks and parts in float64.

#include "cpu_kernels.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t MAX_PARTS = 64, MIN_PART = 65536;  // MIN_PART numbers each
constexpr int64_t BLOCK = 64, GROUP = 4;  // rows; GROUP of them are added in registers before the sum in memory

inline float load(float value) { return value; }

inline float load(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    return read<float>(&bits);
}

inline void store(float value, float* to) { *to = value; }

inline void store(float value, bfloat16* to) {
    to->bits = static_cast<uint16_t>(round_to_bfloat16(read<uint32_t>(&value)));
}

// e^x to a few units in the last place: 2^n e^r with |r| at most ln 2 / 2, e^r as a series up to r^7 / 7!. From 88.4 on,
// n is 128 and the result infinity; below -87 the result is e^-87.
inline float exponential(float x) {
    const float limited = std::min(std::max(x, -87.0f), 89.0f);
    const float halves = limited * 1.44269504f;
    const int32_t n = static_cast<int32_t>(halves + (halves < 0 ? -0.5f : 0.5f));
    const float r = (limited - static_cast<float>(n) * 0.693359375f) + static_cast<float>(n) * 2.12194440e-4f;
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1;
    sum = sum * r + 1;
    const int32_t bits = (n + 127) << 23;
    return sum * read<float>(&bits);
}

enum Activation { RELU, SILU };

template <Activation kind>
inline float activate(float z) {
    return kind == SILU ? z / (1 + exponential(-z)) : z < 0 ? 0 : z;
}

// The activation's derivative times `gradient`.
template <Activation kind>
inline float through(float z, float gradient) {
    if (kind == RELU) return z > 0 ? gradient : 0.0f;
    const float gate = 1 / (1 + exponential(-z));
    return gradient * gate * (1 + z * (1 - gate));
}

struct Rows {
    int64_t first, last;
};

int64_t count_parts(int64_t pixels, int64_t channels) {
    return std::clamp<int64_t>(pixels * channels / MIN_PART, 1, std::min(MAX_PARTS, pixels));
}

Rows rows_of(int64_t part, int64_t parts, int64_t pixels) {
    return {part * pixels / parts, (part + 1) * pixels / parts};
}

// Add rows' distances from `level`, and their squares, to `sum` and `squares` [channels].
template <int64_t rows, typename T>
void add_rows(const T* __restrict x, const float* __restrict level, int64_t channels, float* __restrict sum,
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

// Compute `total` and `products` [channels], both sums over rows: `add` sums a block of rows in float, blocks are added
// in double.
template <typename Add>
void sum_blocks(Rows rows, int64_t channels, double* total, double* products, Add add) {
    std::vector<float> sum(channels), product(channels);
    std::fill(total, total + channels, 0.0);
    std::fill(products, products + channels, 0.0);
    for (int64_t first = rows.first; first < rows.last; first += BLOCK) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        std::fill(product.begin(), product.end(), 0.0f);
        add(Rows{first, std::min(first + BLOCK, rows.last)}, sum.data(), product.data());
        for (int64_t c = 0; c < channels; ++c) {
            total[c] += sum[c];
            products[c] += product[c];
        }
    }
}

// Add all parts of sums [parts][channels] to the first, in order.
void add_parts(std::vector<double>& sums, int64_t parts, int64_t channels) {
    for (int64_t part = 1; part < parts; ++part)
        for (int64_t c = 0; c < channels; ++c) sums[c] += sums[part * channels + c];
}

// Sum a part's distances from `level`, and their squares, into `total` and `squares` [channels].
template <typename T>
void part_statistics(const T* x, const float* level, Rows rows, int64_t channels, double* total, double* squares) {
    sum_blocks(rows, channels, total, squares, [=](Rows block, float* sum, float* square) {
        int64_t row = block.first;
        for (; row + GROUP <= block.last; row += GROUP)
            add_rows<GROUP>(x + row * channels, level, channels, sum, square);
        for (; row < block.last; ++row) add_rows<1>(x + row * channels, level, channels, sum, square);
    });
}

// The same expression in forward and backward, so that ReLU's mask is the same.
inline float normalised(float x, float mean, float scale, float bias) { return (x - mean) * scale + bias; }

template <bool added, Activation kind, typename T>
void apply_rows(const T* __restrict x, const T* __restrict shortcut, const float* __restrict mean,
                const float* __restrict scale, const float* __restrict bias, Rows rows, int64_t channels,
                T* __restrict out) {
    for (int64_t at = rows.first * channels; at < rows.last * channels; at += channels)
        for (int64_t c = 0; c < channels; ++c) {
            float value = normalised(load(x[at + c]), mean[c], scale[c], bias[c]);
            if (added) value += load(shortcut[at + c]);
            store(activate<kind>(value), out + at + c);
        }
}

template <typename T>
void forward(const T* x, const T* shortcut, const float* weight, const float* bias, float* running_mean,
             float* running_var, float* mean, float* invstd, T* out, int64_t pixels, int64_t channels, int64_t silu,
             double momentum, double eps) {
    const int64_t parts = count_parts(pixels, channels);
    const double count = static_cast<double>(pixels);
    std::vector<double> totals(parts * channels), squares(parts * channels);
    // The first block's mean: subtracted before squaring, so that the difference of two large sums loses no digits.
    std::vector<float> level(channels), scale(channels);
    const int64_t block = std::min(BLOCK, pixels);
    part_statistics(x, level.data(), {0, block}, channels, totals.data(), squares.data());
    for (int64_t c = 0; c < channels; ++c) level[c] = static_cast<float>(totals[c] / static_cast<double>(block));
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; ++part)
        part_statistics(x, level.data(), rows_of(part, parts, pixels), channels, &totals[part * channels],
                        &squares[part * channels]);
    add_parts(totals, parts, channels);
    add_parts(squares, parts, channels);
    for (int64_t c = 0; c < channels; ++c) {
        const double total = totals[c], square = squares[c];
        const double distance = total / count, middle = level[c] + distance;
        const double variance = std::max(square / count - distance * distance, 0.0);
        mean[c] = static_cast<float>(middle);
        invstd[c] = static_cast<float>(1 / std::sqrt(variance + eps));
        scale[c] = invstd[c] * weight[c];
        running_mean[c] = static_cast<float>((1 - momentum) * running_mean[c] + momentum * middle);
        running_var[c] =
            static_cast<float>((1 - momentum) * running_var[c] + momentum * variance * (count / (count - 1)));
    }
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
        const Rows rows = rows_of(part, parts, pixels);
        if (shortcut)
            apply_rows<true, RELU>(x, shortcut, mean, scale.data(), bias, rows, channels, out);
        else if (silu)
            apply_rows<false, SILU>(x, x, mean, scale.data(), bias, rows, channels, out);
        else
            apply_rows<false, RELU>(x, x, mean, scale.data(), bias, rows, channels, out);
    }
}

// The gradient through the activation. ReLU's mask with a shortcut is read off the output; else the input is recomputed.
template <bool added, Activation kind, typename T>
inline float passed(T gradient, T x, T out, float mean, float scale, float bias) {
    const float incoming = load(gradient);  // unconditionally: a conditional load is not vectorised
    return through<kind>(added ? load(out) : normalised(load(x), mean, scale, bias), incoming);
}

// Whether the first pass stores these gradients for the second: with a shortcut, as its gradient; SiLU's, as costly.
template <bool added, Activation kind>
constexpr bool keeps_passed = added || kind == SILU;

// Add the gradients through the activation, and them times x - mean, to `sum` and `product` [channels].
template <bool added, Activation kind, typename T>
void add_gradients(const T* __restrict gradient, const T* __restrict x, const T* __restrict out,
                   const float* __restrict mean, const float* __restrict scale, const float* __restrict bias, Rows rows,
                   int64_t channels, T* __restrict kept, float* __restrict sum, float* __restrict product) {
    for (int64_t at = rows.first * channels; at < rows.last * channels; at += channels)
        for (int64_t c = 0; c < channels; ++c) {
            const float value = passed<added, kind>(gradient[at + c], x[at + c], out[at + c], mean[c], scale[c], bias[c]);
            sum[c] += value;
            product[c] += value * (load(x[at + c]) - mean[c]);
            if (keeps_passed<added, kind>) store(value, kept + at + c);
        }
}

template <bool added, Activation kind, typename T>
void part_gradients(const T* gradient, const T* x, const T* out, const float* mean, const float* scale,
                    const float* bias, Rows rows, int64_t channels, T* kept, double* total, double* products) {
    sum_blocks(rows, channels, total, products, [=](Rows block, float* sum, float* product) {
        add_gradients<added, kind>(gradient, x, out, mean, scale, bias, block, channels, kept, sum, product);
    });
}

// Compute the gradient of x; `gradient` is already through the activation if keeps_passed, and may be in `grad_x`.
template <bool added, Activation kind, typename T>
void apply_gradients(const T* gradient, const T* __restrict x, const float* __restrict mean,
                     const float* __restrict scale, const float* __restrict bias, const float* __restrict level,
                     const float* __restrict slope, Rows rows, int64_t channels, T* grad_x) {
    for (int64_t at = rows.first * channels; at < rows.last * channels; at += channels)
#pragma GCC ivdep
        for (int64_t c = 0; c < channels; ++c) {
            const float value =
                keeps_passed<added, kind>
                    ? load(gradient[at + c])
                    : passed<false, kind>(gradient[at + c], x[at + c], x[at + c], mean[c], scale[c], bias[c]);
            const float centred = load(x[at + c]) - mean[c];
            store((value - level[c] - centred * slope[c]) * scale[c], grad_x + at + c);
        }
}

template <bool added, Activation kind, typename T>
void backward_of(const T* gradient, const T* x, const T* out, const float* weight, const float* bias,
                 const float* mean, const float* invstd, T* grad_x, T* grad_shortcut, float* grad_weight,
                 float* grad_bias, int64_t pixels, int64_t channels) {
    const int64_t parts = count_parts(pixels, channels);
    const double count = static_cast<double>(pixels);
    std::vector<double> totals(parts * channels), products(parts * channels);
    std::vector<float> level(channels), slope(channels), scale(channels);
    T* kept = added ? grad_shortcut : grad_x;
    for (int64_t c = 0; c < channels; ++c) scale[c] = invstd[c] * weight[c];
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; ++part)
        part_gradients<added, kind>(gradient, x, out, mean, scale.data(), bias, rows_of(part, parts, pixels), channels,
                                    kept, &totals[part * channels], &products[part * channels]);
    add_parts(totals, parts, channels);
    add_parts(products, parts, channels);
    for (int64_t c = 0; c < channels; ++c) {
        const double total = totals[c], product = products[c];
        grad_bias[c] = static_cast<float>(total);
        grad_weight[c] = static_cast<float>(product * invstd[c]);
        level[c] = static_cast<float>(total / count);
        slope[c] = static_cast<float>(product * invstd[c] * invstd[c] / count);
    }
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; ++part)
        apply_gradients<added, kind>(keeps_passed<added, kind> ? kept : gradient, x, mean, scale.data(), bias,
                                     level.data(), slope.data(), rows_of(part, parts, pixels), channels, grad_x);
}

template <typename T>
void backward(const T* gradient, const T* x, const T* out, const float* weight, const float* bias, const float* mean,
              const float* invstd, T* grad_x, T* grad_shortcut, float* grad_weight, float* grad_bias, int64_t pixels,
              int64_t channels, int64_t silu) {
    const auto run = out    ? backward_of<true, RELU, T>
                     : silu ? backward_of<false, SILU, T>
                            : backward_of<false, RELU, T>;
    run(gradient, x, out ? out : x, weight, bias, mean, invstd, grad_x, grad_shortcut, grad_weight, grad_bias, pixels,
         channels);
}

}  // namespace

// The kernels' addresses.
extern "C" const auto norm_relu_forward_float32 = &forward<float>;
extern "C" const auto norm_relu_forward_bfloat16 = &forward<bfloat16>;
extern "C" const auto norm_relu_backward_float32 = &backward<float>;
extern "C" const auto norm_relu_backward_bfloat16 = &backward<bfloat16>;

// CONV: the transforms of winograd.py, over NHWC memory, for weights too. A tile's numbers lie in planes
// [position][tile][channels], so that each plane is a matrix. Planes have one extra row, of zeros: without it a tile's
// positions would compete for a few cache sets. No order of sums depends on the number of threads.

#include "cpu_kernels.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int SIDE = 4, ACROSS = SIDE + 2;  // of a tile's outputs, and of its planes and input pixels
constexpr int PLANES = ACROSS * ACROSS;
constexpr int64_t LANES = 16;  // channels at a time, 64 bytes; the number of channels is a multiple of it
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t HighBits __attribute__((vector_size(LANES * sizeof(uint16_t))));

INLINE Lanes load(const float* from) { return read<Lanes>(from); }

INLINE Lanes load(const bfloat16* from) {
    const Bits bits = __builtin_convertvector(read<HighBits>(from), Bits) << 16;
    return read<Lanes>(&bits);
}

INLINE void store(Lanes value, float* to) { std::memcpy(to, &value, sizeof value); }

INLINE void store(Lanes value, bfloat16* to) {
#ifdef __AVX512BF16__
    const __m256bh high = _mm512_cvtneps_pbh(read<__m512>(&value));
#else
    const HighBits high = __builtin_convertvector(round_to_bfloat16(read<Bits>(&value)), HighBits);
#endif
    std::memcpy(to, &high, sizeof high);
}

// Lavin and Gray's matrices (arXiv:1509.09308) B', A and G, and their transposes, times a vector. Their points 0, 5/8,
// -5/8, 3/2, -3/2 and infinity halve the effect of rounding the planes compared with 1, -1, 2 and -2. The rows of a
// point and its negative differ in signs only and share their sums.
INLINE void set_pair(Lanes even, Lanes odd, Lanes* y) {
    y[0] = even + odd;
    y[1] = even - odd;
}

INLINE void images_by_row(const Lanes* x, Lanes* y) {
    y[0] = .87890625f * x[0] - 2.640625f * x[2] + x[4];
    set_pair(-2.25f * x[2] + x[4], -1.40625f * x[1] + .625f * x[3], y + 1);
    set_pair(-.390625f * x[2] + x[4], -.5859375f * x[1] + 1.5f * x[3], y + 3);
    y[5] = .87890625f * x[1] - 2.640625f * x[3] + x[5];
}

INLINE void images_by_column(const Lanes* x, Lanes* y) {
    Lanes first[2], second[2];
    set_pair(x[1], x[2], first);
    set_pair(x[3], x[4], second);
    y[0] = .87890625f * x[0];
    y[1] = -1.40625f * first[1] - .5859375f * second[1] + .87890625f * x[5];
    y[2] = -2.640625f * x[0] - 2.25f * first[0] - .390625f * second[0];
    y[3] = .625f * first[1] + 1.5f * second[1] - 2.640625f * x[5];
    y[4] = x[0] + first[0] + second[0];
    y[5] = x[5];
}

INLINE void outputs_by_column(const Lanes* x, Lanes* y) {
    y[0] = x[0];
    set_pair(x[0] + .390625f * x[2], .625f * x[1] + .244140625f * x[3], y + 1);
    set_pair(x[0] + 2.25f * x[2], 1.5f * x[1] + 3.375f * x[3], y + 3);
    y[5] = x[3];
}

INLINE void outputs_by_row(const Lanes* x, Lanes* y) {
    Lanes first[2], second[2];
    set_pair(x[1], x[2], first);
    set_pair(x[3], x[4], second);
    y[0] = x[0] + first[0] + second[0];
    y[1] = .625f * first[1] + 1.5f * second[1];
    y[2] = .390625f * first[0] + 2.25f * second[0];
    y[3] = .244140625f * first[1] + 3.375f * second[1] + x[5];
}

INLINE void weights_by_row(const Lanes* x, Lanes* y) {
    y[0] = static_cast<float>(256. / 225) * x[0];
    set_pair(static_cast<float>(-2048. / 2975) * x[0] + static_cast<float>(-32. / 119) * x[2],
             static_cast<float>(-256. / 595) * x[1], y + 1);
    set_pair(static_cast<float>(128. / 1071) * x[0] + static_cast<float>(32. / 119) * x[2],
             static_cast<float>(64. / 357) * x[1], y + 3);
    y[5] = x[2];
}

INLINE void weights_by_column(const Lanes* x, Lanes* y) {
    Lanes first[2], second[2];
    set_pair(x[1], x[2], first);
    set_pair(x[3], x[4], second);
    y[0] = static_cast<float>(256. / 225) * x[0] + static_cast<float>(-2048. / 2975) * first[0] +
           static_cast<float>(128. / 1071) * second[0];
    y[1] = static_cast<float>(-256. / 595) * first[1] + static_cast<float>(64. / 357) * second[1];
    y[2] = static_cast<float>(-32. / 119) * first[0] + static_cast<float>(32. / 119) * second[0] + x[5];
}

// out = matrix * in * matrix', where `multiply` multiplies the matrix by a vector.
template <void (*multiply)(const Lanes*, Lanes*), int columns, int rows>
INLINE void transform(const Lanes (&in)[columns][columns], Lanes (&out)[rows][rows]) {
    Lanes half[columns][rows];
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) {
        Lanes column[columns];
        for (int k = 0; k < columns; ++k) column[k] = in[k][j];
        multiply(column, half[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
        Lanes row[columns];
        for (int k = 0; k < columns; ++k) row[k] = half[k][i];
        multiply(row, out[i]);
    }
}

struct Sizes {
    int64_t images, height, width, channels, down, across, plane;

    explicit Sizes(const int64_t* given)
        : images(given[0]), height(given[1]), width(given[2]), channels(given[3]), down((height + SIDE - 1) / SIDE),
          across((width + SIDE - 1) / SIDE), plane((images * down * across + 1) * channels) {}
};

// One tile of `size` x `size` pixels of an image, the first ones `border` pixels outside it.
template <int size, int border>
struct Tile {
    int64_t offset[size][size];  // of a pixel in the images; -1 outside
    int64_t first;               // the tile's offset in the first plane

    // A line is a row of tiles of one image.
    Tile(const Sizes& sizes, int64_t line, int64_t column) : first((line * sizes.across + column) * sizes.channels) {
        const int64_t image = line / sizes.down;
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j) {
                const int64_t y = line % sizes.down * SIDE - border + i, x = column * SIDE - border + j;
                const bool inside = 0 <= y && y < sizes.height && 0 <= x && x < sizes.width;
                offset[i][j] = inside ? ((image * sizes.height + y) * sizes.width + x) * sizes.channels : -1;
            }
    }
};

// task(tile) for each tile
template <int size, int border, typename Task>
void for_tiles(const Sizes& sizes, Task task) {
#pragma omp parallel for schedule(static)
    for (int64_t line = 0; line < sizes.images * sizes.down; ++line)
        for (int64_t column = 0; column < sizes.across; ++column) task(Tile<size, border>(sizes, line, column));
}

// Load or store LANES channels of a tile's planes, which lie `step` numbers apart.
template <typename Number>
INLINE void load_planes(const Number* planes, int64_t step, Lanes (&in)[ACROSS][ACROSS]) {
#pragma GCC unroll 36
    for (int i = 0; i < PLANES; ++i) in[i / ACROSS][i % ACROSS] = load(planes + i * step);
}

template <typename Number>
INLINE void store_planes(const Lanes (&out)[ACROSS][ACROSS], Number* planes, int64_t step) {
#pragma GCC unroll 36
    for (int i = 0; i < PLANES; ++i) store(out[i / ACROSS][i % ACROSS], planes + i * step);
}

// Planes of tiles of pixels, and zeros in the last row of each plane.
template <void (*multiply)(const Lanes*, Lanes*), int size, int border, typename Number>
void to_planes(const Number* pixels, Number* planes, const Sizes& sizes) {
    const std::vector<Number> zeros(sizes.channels);
    for_tiles<size, border>(sizes, [&](const auto& tile) {
        const Number* from[size][size];
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j)
                from[i][j] = tile.offset[i][j] < 0 ? zeros.data() : pixels + tile.offset[i][j];
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            Lanes in[size][size], out[ACROSS][ACROSS];
            for (int i = 0; i < size; ++i)
                for (int j = 0; j < size; ++j) in[i][j] = load(from[i][j] + c);
            transform<multiply>(in, out);
            store_planes(out, planes + tile.first + c, sizes.plane);
        }
    });
    for (int place = 1; place <= PLANES; ++place)
        std::memset(planes + place * sizes.plane - sizes.channels, 0, sizes.channels * sizeof(Number));
}

template <typename Number>
void images_to_planes(const Number* images, Number* planes, const int64_t* given) {
    to_planes<images_by_row, ACROSS, 1>(images, planes, Sizes(given));
}

template <typename Number>
void gradient_to_planes(const Number* gradient, Number* planes, const int64_t* given) {
    to_planes<outputs_by_column, SIDE, 0>(gradient, planes, Sizes(given));
}

template <typename Number>
void planes_to_outputs(const Number* planes, Number* outputs, const int64_t* given) {
    const Sizes sizes(given);
    for_tiles<SIDE, 0>(sizes, [&](const auto& tile) {
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            Lanes in[ACROSS][ACROSS], out[SIDE][SIDE];
            load_planes(planes + tile.first + c, sizes.plane, in);
            transform<outputs_by_row>(in, out);
            for (int i = 0; i < SIDE; ++i)
                for (int j = 0; j < SIDE; ++j)
                    if (tile.offset[i][j] >= 0) store(out[i][j], outputs + tile.offset[i][j] + c);
        }
    });
}

// Overlapping tiles of an image add up, in float32; one thread computes all tiles of LANES channels of an image.
template <typename Number>
void planes_to_gradient(const Number* planes, Number* gradient, const int64_t* given) {
    const Sizes sizes(given);
    const int64_t pixels = sizes.height * sizes.width;
#pragma omp parallel
    {
        std::vector<float> sums(pixels * LANES);
#pragma omp for collapse(2) schedule(static)
        for (int64_t image = 0; image < sizes.images; ++image)
            for (int64_t c = 0; c < sizes.channels; c += LANES) {
                std::memset(sums.data(), 0, sums.size() * sizeof(float));
                const int64_t before = image * pixels * sizes.channels;
                for (int64_t place = 0; place < sizes.down * sizes.across; ++place) {
                    const int64_t line = image * sizes.down + place / sizes.across;
                    const Tile<ACROSS, 1> tile(sizes, line, place % sizes.across);
                    Lanes in[ACROSS][ACROSS], out[ACROSS][ACROSS];
                    load_planes(planes + tile.first + c, sizes.plane, in);
                    transform<images_by_column>(in, out);
#pragma GCC unroll 36
                    for (int i = 0; i < PLANES; ++i) {
                        const int64_t offset = tile.offset[i / ACROSS][i % ACROSS];
                        if (offset < 0) continue;
                        float* to = sums.data() + (offset - before) / sizes.channels * LANES;
                        store(load(to) + out[i / ACROSS][i % ACROSS], to);
                    }
                }
                for (int64_t pixel = 0; pixel < pixels; ++pixel)
                    store(load(sums.data() + pixel * LANES), gradient + before + pixel * sizes.channels + c);
            }
    }
}

// weights [outputs][3][3][channels] -> planes [position][outputs][channels]
template <typename Number>
void weights_to_planes(const float* weights, Number* planes, const int64_t* given) {
    const int64_t outputs = given[0], channels = given[1];
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < outputs; ++output)
        for (int64_t c = 0; c < channels; c += LANES) {
            Lanes in[3][3], out[ACROSS][ACROSS];
            for (int i = 0; i < 9; ++i) in[i / 3][i % 3] = load(weights + (output * 9 + i) * channels + c);
            transform<weights_by_row>(in, out);
            store_planes(out, planes + output * channels + c, outputs * channels);
        }
}

// Gradient of the planes -> gradient of the weights.
void planes_to_weights(const float* planes, float* weights, const int64_t* given) {
    const int64_t outputs = given[0], channels = given[1];
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < outputs; ++output)
        for (int64_t c = 0; c < channels; c += LANES) {
            Lanes in[ACROSS][ACROSS], out[3][3];
            load_planes(planes + output * channels + c, outputs * channels, in);
            transform<weights_by_column>(in, out);
            for (int i = 0; i < 9; ++i) store(out[i / 3][i % 3], weights + (output * 9 + i) * channels + c);
        }
}

}  // namespace

// The address of each transform, which takes the addresses of its tensors and of their sizes.
#define EXPORT(name)                                      \
    extern "C" const auto name##_float32 = &name<float>; \
    extern "C" const auto name##_bfloat16 = &name<bfloat16>;

EXPORT(weights_to_planes)
EXPORT(images_to_planes)
EXPORT(gradient_to_planes)
EXPORT(planes_to_outputs)
EXPORT(planes_to_gradient)
extern "C" const auto planes_to_weights_float32 = &planes_to_weights;

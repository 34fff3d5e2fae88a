// CONV: the transforms of winograd.py, over NHWC memory, for weights too. A tile's numbers lie in planes
// [position][tile][channels], so that each plane is a matrix. Planes have one extra row, of zeros: without it a tile's
// positions would compete for a few cache sets. No order of sums depends on the number of threads.

#include "cpu_kernels.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;  // channels at a time, 64 bytes; the number of channels is a multiple of it
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
inline Lanes load(const float* from) { return read<Lanes>(from); }

inline void store(Lanes value, float* to) { std::memcpy(to, &value, sizeof value); }

typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t HighBits __attribute__((vector_size(LANES * sizeof(uint16_t))));

inline Lanes load(const bfloat16* from) {
    const Bits bits = __builtin_convertvector(read<HighBits>(from), Bits) << 16;
    return read<Lanes>(&bits);
}

inline void store(Lanes value, bfloat16* to) {
#ifdef __AVX512BF16__
    const __m256bh high = _mm512_cvtneps_pbh(read<__m512>(&value));
#else
    const HighBits high = __builtin_convertvector(round_to_bfloat16(read<Bits>(&value)), HighBits);
#endif
    std::memcpy(to, &high, sizeof high);
}

// Lavin and Gray's B', G and A (arXiv:1509.09308) for outputs of `side` x `side`, from the points 0, 1, -1, 2,
// infinity; 6 also uses -2, 1/2 and -1/2. 4 uses 0, 5/8, -5/8, 3/2, -3/2 and infinity, which halve the effect of
// rounding the planes compared with 1, -1, 2 and -2.
template <int side>
struct Winograd;

template <>
struct Winograd<3> {
    static constexpr float images[5][5] = {
        {2, -1, -2, 1, 0}, {0, -2, -1, 1, 0}, {0, 2, -3, 1, 0}, {0, -1, 0, 1, 0}, {0, 2, -1, -2, 1}};
    static constexpr float weights[5][3] = {
        {1. / 2, 0, 0}, {-1. / 2, -1. / 2, -1. / 2}, {-1. / 6, 1. / 6, -1. / 6}, {1. / 6, 1. / 3, 2. / 3}, {0, 0, 1}};
    static constexpr float outputs[5][3] = {{1, 0, 0}, {1, 1, 1}, {1, -1, 1}, {1, 2, 4}, {0, 0, 1}};
};

template <>
struct Winograd<4> {
    static constexpr float images[6][6] = {
        {.87890625f, 0, -2.640625f, 0, 1, 0},         {0, -1.40625f, -2.25f, .625f, 1, 0},
        {0, 1.40625f, -2.25f, -.625f, 1, 0},          {0, -.5859375f, -.390625f, 1.5f, 1, 0},
        {0, .5859375f, -.390625f, -1.5f, 1, 0},       {0, .87890625f, 0, -2.640625f, 0, 1}};
    static constexpr float weights[6][3] = {
        {256. / 225, 0, 0},                        {-2048. / 2975, -256. / 595, -32. / 119},
        {-2048. / 2975, 256. / 595, -32. / 119},   {128. / 1071, 64. / 357, 32. / 119},
        {128. / 1071, -64. / 357, 32. / 119},      {0, 0, 1}};
    static constexpr float outputs[6][4] = {
        {1, 0, 0, 0},                              {1, .625f, .390625f, .244140625f},
        {1, -.625f, .390625f, -.244140625f},       {1, 1.5f, 2.25f, 3.375f},
        {1, -1.5f, 2.25f, -3.375f},                {0, 0, 0, 1}};
};

template <>
struct Winograd<6> {
    static constexpr float images[8][8] = {
        {1, 0, -5.25f, 0, 5.25f, 0, -1, 0},      {0, 1, 1, -4.25f, -4.25f, 1, 1, 0},
        {0, -1, 1, 4.25f, -4.25f, -1, 1, 0},     {0, .5f, .25f, -2.5f, -1.25f, 2, 1, 0},
        {0, -.5f, .25f, 2.5f, -1.25f, -2, 1, 0}, {0, 2, 4, -2.5f, -5, .5f, 1, 0},
        {0, -2, 4, 2.5f, -5, -.5f, 1, 0},        {0, -1, 0, 5.25f, 0, -5.25f, 0, 1}};
    static constexpr float weights[8][3] = {
        {1, 0, 0},                   {-2. / 9, -2. / 9, -2. / 9},   {-2. / 9, 2. / 9, -2. / 9},
        {1. / 90, 1. / 45, 2. / 45}, {1. / 90, -1. / 45, 2. / 45},  {1. / 45, 1. / 90, 1. / 180},
        {1. / 45, -1. / 90, 1. / 180}, {0, 0, 1}};
    static constexpr float outputs[8][6] = {
        {1, 0, 0, 0, 0, 0},      {1, 1, 1, 1, 1, 1},       {1, -1, 1, -1, 1, -1}, {1, 2, 4, 8, 16, 32},
        {1, -2, 4, -8, 16, -32}, {32, 16, 8, 4, 2, 1},     {32, -16, 8, -4, 2, -1}, {0, 0, 0, 0, 0, 1}};
};

// Sum of factor(k) * value(k). The loop is unrolled, so zeros and ones are known at compile time.
template <int count, typename Factor, typename Value>
inline __attribute__((always_inline)) Lanes combine(Factor factor, Value value) {
    Lanes sum = {};
    bool empty = true;
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k) {
        if (factor(k) == 0) continue;
        const Lanes term = factor(k) == 1 ? value(k) : factor(k) == -1 ? -value(k) : factor(k) * value(k);
        sum = empty ? term : sum + term;
        empty = false;
    }
    return sum;
}

// Whether rows i and i + 1 of a matrix belong to a point and its negative: equal up to signs.
template <int rows, int columns>
constexpr bool is_pair(const float (&matrix)[rows][columns], int i) {
    if (i % 2 == 0 || i + 1 >= rows) return false;
    for (int k = 0; k < columns; ++k)
        if (matrix[i][k] != matrix[i + 1][k] && matrix[i][k] != -matrix[i + 1][k]) return false;
    return true;
}

// set(i, sum of matrix[i][k] * value(k)) for each row i. The rows of a pair share the sum of their equal terms and the
// sum of their opposite terms.
template <int rows, int columns, typename Value, typename Set>
inline __attribute__((always_inline)) void multiply(const float (&matrix)[rows][columns], Value value, Set set) {
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
        if (i > 0 && is_pair(matrix, i - 1)) continue;
        if (!is_pair(matrix, i)) {
            set(i, combine<columns>([&](int k) { return matrix[i][k]; }, value));
            continue;
        }
        const auto factor = [&](int k, bool equal) {
            return (matrix[i][k] == matrix[i + 1][k]) == equal ? matrix[i][k] : 0;
        };
        const Lanes even = combine<columns>([&](int k) { return factor(k, true); }, value);
        const Lanes odd = combine<columns>([&](int k) { return factor(k, false); }, value);
        set(i, even + odd);
        set(i + 1, even - odd);
    }
}

// The same with the transposed matrix: a pair's values are added and subtracted before multiplying.
template <int rows, int columns, typename Value, typename Set>
inline __attribute__((always_inline)) void multiply_transposed(const float (&matrix)[rows][columns], Value value,
                                                               Set set) {
    Lanes shared[rows];
#pragma GCC unroll 8
    for (int k = 0; k < rows; ++k) {
        if (k > 0 && is_pair(matrix, k - 1)) continue;
        shared[k] = value(k);
        if (!is_pair(matrix, k)) continue;
        const Lanes second = value(k + 1);
        shared[k + 1] = shared[k] - second;
        shared[k] = shared[k] + second;
    }
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) {
        const auto factor = [&](int k) {
            if (k > 0 && is_pair(matrix, k - 1)) return matrix[k][i] != matrix[k - 1][i] ? matrix[k - 1][i] : 0;
            return !is_pair(matrix, k) || matrix[k][i] == matrix[k + 1][i] ? matrix[k][i] : 0;
        };
        set(i, combine<rows>(factor, [&](int k) { return shared[k]; }));
    }
}

// out [after][after] = matrix * in * matrix', or with `transposed` matrix' * in * matrix
template <bool transposed, int rows, int columns, int before, int after>
inline __attribute__((always_inline)) void transform(const float (&matrix)[rows][columns],
                                                     const Lanes (&in)[before][before], Lanes (&out)[after][after]) {
    const auto apply = [&](auto value, auto set) __attribute__((always_inline)) {
        if constexpr (transposed)
            multiply_transposed(matrix, value, set);
        else
            multiply(matrix, value, set);
    };
    Lanes half[after][before];
#pragma GCC unroll 8
    for (int j = 0; j < before; ++j)
        apply([&](int k) { return in[k][j]; }, [&](int i, Lanes value) { half[i][j] = value; });
#pragma GCC unroll 8
    for (int i = 0; i < after; ++i)
        apply([&](int k) { return half[i][k]; }, [&](int j, Lanes value) { out[i][j] = value; });
}

struct Sizes {
    int64_t images, height, width, channels, down, across, plane;

    Sizes(int64_t side, const int64_t* given)
        : images(given[0]), height(given[1]), width(given[2]), channels(given[3]), down((height + side - 1) / side),
          across((width + side - 1) / side), plane((images * down * across + 1) * channels) {}
};

// One tile: `across` x `across` pixels of an image, some of which may lie outside it.
template <int across>
struct Tile {
    int64_t offset[across][across];  // of a pixel in the images; -1 outside
    int64_t first;                   // the tile's offset in the first plane

    // Tiles lie `step` pixels apart, the first one `border` pixels outside.
    Tile(const Sizes& sizes, int64_t line, int64_t column, int64_t step, int64_t border)
        : first((line * sizes.across + column) * sizes.channels) {
        const int64_t image = line / sizes.down, top = line % sizes.down * step - border;
        const int64_t left = column * step - border;
        for (int i = 0; i < across; ++i)
            for (int j = 0; j < across; ++j) {
                const int64_t y = top + i, x = left + j;
                const bool inside = 0 <= y && y < sizes.height && 0 <= x && x < sizes.width;
                offset[i][j] = inside ? ((image * sizes.height + y) * sizes.width + x) * sizes.channels : -1;
            }
    }
};

// task(tile) for each tile; a line is a row of tiles
template <int across, typename Task>
void for_tiles(const Sizes& sizes, int64_t step, int64_t border, Task task) {
#pragma omp parallel for schedule(static)
    for (int64_t line = 0; line < sizes.images * sizes.down; ++line)
        for (int64_t column = 0; column < sizes.across; ++column)
            task(Tile<across>(sizes, line, column, step, border));
}

// B' pixels B of images, in tiles that overlap and begin outside them, or A gradient A' of outputs.
template <int side, const auto& matrix, typename Number>
void to_planes(const Number* pixels, Number* planes, const int64_t* given) {
    const Sizes sizes(side, given);
    constexpr int rows = side + 2, across = std::size(matrix[0]);
    const std::vector<Number> zeros(sizes.channels);
    for_tiles<across>(sizes, side, across != side, [&](const Tile<across>& tile) {
        const Number* from[across][across];
        for (int i = 0; i < across; ++i)
            for (int j = 0; j < across; ++j)
                from[i][j] = tile.offset[i][j] < 0 ? zeros.data() : pixels + tile.offset[i][j];
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            Lanes in[across][across], out[rows][rows];
            for (int i = 0; i < across; ++i)
                for (int j = 0; j < across; ++j) in[i][j] = load(from[i][j] + c);
            transform<false>(matrix, in, out);
            for (int i = 0; i < rows; ++i)  // two loops, which the compiler unrolls
                for (int j = 0; j < rows; ++j)
                    store(out[i][j], planes + (i * rows + j) * sizes.plane + tile.first + c);
        }
    });
    for (int place = 1; place <= rows * rows; ++place)  // the last row of each plane
        std::memset(planes + place * sizes.plane - sizes.channels, 0, sizes.channels * sizeof(Number));
}

// out = matrix' * planes * matrix, for LANES channels of one tile at the offset `first`.
template <int rows, int columns, typename Number>
inline void from_planes(const float (&matrix)[rows][columns], const Number* planes, const Sizes& sizes, int64_t first,
                        Lanes (&out)[columns][columns]) {
    Lanes in[rows][rows];
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < rows; ++j) in[i][j] = load(planes + (i * rows + j) * sizes.plane + first);
    transform<true>(matrix, in, out);
}

// Weights [outputs][3][3][channels] -> planes [position][outputs][channels], G w G'; for gradients the other way.
template <int side, bool gradient, typename From, typename To>
void transform_weights(const From* from, To* to, const int64_t* given) {
    const int64_t outputs = given[0], channels = given[1];
    constexpr int before = gradient ? side + 2 : 3, after = gradient ? 3 : side + 2;
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < outputs; ++output)
        for (int64_t c = 0; c < channels; c += LANES) {
            const auto offset = [&](int64_t i, bool plane) {
                return (plane ? i * outputs + output : output * 9 + i) * channels + c;
            };
            Lanes in[before][before], out[after][after];
            for (int i = 0; i < before * before; ++i) in[i / before][i % before] = load(from + offset(i, gradient));
            transform<gradient>(Winograd<side>::weights, in, out);
            for (int i = 0; i < after * after; ++i) store(out[i / after][i % after], to + offset(i, !gradient));
        }
}

template <int side, typename Number>
void planes_to_outputs(const Number* planes, Number* outputs, const int64_t* given) {
    const Sizes sizes(side, given);
    for_tiles<side>(sizes, side, 0, [&](const Tile<side>& tile) {
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            Lanes out[side][side];
            from_planes(Winograd<side>::outputs, planes, sizes, tile.first + c, out);
            for (int i = 0; i < side; ++i)
                for (int j = 0; j < side; ++j)
                    if (tile.offset[i][j] >= 0) store(out[i][j], outputs + tile.offset[i][j] + c);
        }
    });
}

// Overlapping tiles of an image add up, in float32; one thread computes all tiles of LANES channels of an image.
template <int side, typename Number>
void planes_to_gradient(const Number* planes, Number* gradient, const int64_t* given) {
    const Sizes sizes(side, given);
    constexpr int across = side + 2;
    const int64_t pixels = sizes.height * sizes.width;
#pragma omp parallel
    {
        std::vector<float> sums(pixels * LANES);
#pragma omp for collapse(2) schedule(static)
        for (int64_t image = 0; image < sizes.images; ++image)
            for (int64_t c = 0; c < sizes.channels; c += LANES) {
                std::memset(sums.data(), 0, sums.size() * sizeof(float));
                const int64_t before = image * pixels * sizes.channels;
                for (int64_t line = image * sizes.down; line < (image + 1) * sizes.down; ++line)
                    for (int64_t column = 0; column < sizes.across; ++column) {
                        const Tile<across> tile(sizes, line, column, side, 1);
                        Lanes out[across][across];
                        from_planes(Winograd<side>::images, planes, sizes, tile.first + c, out);
                        for (int i = 0; i < across; ++i)
                            for (int j = 0; j < across; ++j) {
                                if (tile.offset[i][j] < 0) continue;
                                float* to = sums.data() + (tile.offset[i][j] - before) / sizes.channels * LANES;
                                store(load(to) + out[i][j], to);
                            }
                    }
                for (int64_t pixel = 0; pixel < pixels; ++pixel)
                    store(load(sums.data() + pixel * LANES), gradient + before + pixel * sizes.channels + c);
            }
    }
}

}  // namespace

// The address of each transform, which takes the addresses of its tensors and of their sizes.
#define EXPORT(name, side, format, ...) extern "C" const auto name##_##side##_##format = &__VA_ARGS__;
#define EXPORT_ALL(side, Number, format)                                                         \
    EXPORT(weights_to_planes, side, format, transform_weights<side, false, float, Number>)       \
    EXPORT(planes_to_weights, side, format, transform_weights<side, true, Number, float>)        \
    EXPORT(images_to_planes, side, format, to_planes<side, Winograd<side>::images, Number>)      \
    EXPORT(gradient_to_planes, side, format, to_planes<side, Winograd<side>::outputs, Number>)   \
    EXPORT(planes_to_outputs, side, format, planes_to_outputs<side, Number>)                     \
    EXPORT(planes_to_gradient, side, format, planes_to_gradient<side, Number>)
EXPORT_ALL(3, float, float32)
EXPORT_ALL(4, float, float32)
EXPORT_ALL(6, float, float32)
EXPORT_ALL(3, bfloat16, bfloat16)
EXPORT_ALL(4, bfloat16, bfloat16)

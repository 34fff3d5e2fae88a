// CONV: the transforms of conv_winograd.py, over NHWC memory. A tile's numbers lie in planes [place][tile][channels], so
// that each plane is a matrix. It has one more row, of zeros: the places of a tile would else share few sets of the
// cache. Nothing is summed in an order that depends on the number of threads.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 16;  // channels at a time, 64 bytes; their number is a multiple of it
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as arguments, but all these functions are inlined

inline Lanes load(const float* from) {
    Lanes value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(Lanes value, float* to) { std::memcpy(to, &value, sizeof value); }

// Lavin and Gray's B' and A' (arXiv:1509.09308) for outputs of `side` x `side`, from the points 0, 1, -1 and infinity,
// for sides of 3 and 4 also 2, for 4 also -2.
template <int side>
struct Winograd;

template <>
struct Winograd<2> {
    static constexpr float images[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
    static constexpr float outputs[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
};

template <>
struct Winograd<3> {
    static constexpr float images[5][5] = {
        {2, -1, -2, 1, 0}, {0, -2, -1, 1, 0}, {0, 2, -3, 1, 0}, {0, -1, 0, 1, 0}, {0, 2, -1, -2, 1}};
    static constexpr float outputs[3][5] = {{1, 1, 1, 1, 0}, {0, 1, -1, 2, 0}, {0, 1, 1, 4, 1}};
};

template <>
struct Winograd<4> {
    static constexpr float images[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                           {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
    static constexpr float outputs[4][6] = {
        {1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
};

// sum of factor(k) * value(k); the loop is unrolled, and zeros and ones are known then
template <int count, typename Factor, typename Value>
inline __attribute__((always_inline)) Lanes combine(Factor factor, Value value) {
    Lanes sum = {};
    bool empty = true;
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k) {
        if (factor(k) == 0) continue;
        const Lanes term = factor(k) == 1 ? value(k) : factor(k) * value(k);
        sum = empty ? term : sum + term;
        empty = false;
    }
    return sum;
}

// out = matrix in matrix', matrix [rows][columns]
template <int rows, int columns, typename Matrix>
inline __attribute__((always_inline)) void transform(Matrix matrix, const Lanes (&in)[columns][columns],
                                                     Lanes (&out)[rows][rows]) {
    Lanes half[rows][columns];
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j)
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i)
            half[i][j] = combine<columns>([&](int k) { return matrix(i, k); }, [&](int k) { return in[k][j]; });
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < rows; ++j)
            out[i][j] = combine<columns>([&](int k) { return matrix(j, k); }, [&](int k) { return half[i][k]; });
}

struct Sizes {
    int64_t images, height, width, channels, down, across, plane;

    Sizes(int64_t side, int64_t images, int64_t height, int64_t width, int64_t channels)
        : images(images), height(height), width(width), channels(channels), down((height + side - 1) / side),
          across((width + side - 1) / side), plane((images * down * across + 1) * channels) {}
};

// One tile: `across` x `across` pixels from (top, left) of an image on, of which those outside do not exist.
template <int across>
struct Tile {
    int64_t offset[across][across];  // of a pixel in the images; -1 outside
    int64_t first;                   // the tile in the first plane

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

// task(line, column) for each tile; a line is a row of tiles
template <typename Task>
void for_tiles(const Sizes& sizes, Task task) {
#pragma omp parallel for schedule(static)
    for (int64_t line = 0; line < sizes.images * sizes.down; ++line)
        for (int64_t column = 0; column < sizes.across; ++column) task(line, column);
}

// Planes of tiles of `across` x `across` pixels that begin `side` apart, the first `border` outside of the image: B'
// pixels B with a border, A gradient A' without.
template <int side, int across, int rows, int64_t border, typename Matrix>
void to_planes(Matrix matrix, const float* pixels, float* planes, const Sizes& sizes) {
    const std::vector<float> zeros(sizes.channels);
    for_tiles(sizes, [&](int64_t line, int64_t column) {
        const Tile<across> tile(sizes, line, column, side, border);
        const float* from[across][across];
        for (int i = 0; i < across; ++i)
            for (int j = 0; j < across; ++j)
                from[i][j] = tile.offset[i][j] < 0 ? zeros.data() : pixels + tile.offset[i][j];
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            Lanes in[across][across], out[rows][rows];
            for (int i = 0; i < across; ++i)
                for (int j = 0; j < across; ++j) in[i][j] = load(from[i][j] + c);
            transform<rows, across>(matrix, in, out);
            for (int i = 0; i < rows; ++i)
                for (int j = 0; j < rows; ++j)
                    store(out[i][j], planes + (i * rows + j) * sizes.plane + tile.first + c);
        }
    });
    for (int place = 1; place <= rows * rows; ++place)
        std::memset(planes + place * sizes.plane - sizes.channels, 0, sizes.channels * sizeof(float));
}

// What a tile's planes make, channels from c on.
template <int rows, int across, typename Matrix>
inline void from_planes(Matrix matrix, const float* planes, const Sizes& sizes, int64_t first,
                        Lanes (&out)[rows][rows]) {
    Lanes in[across][across];
    for (int i = 0; i < across; ++i)
        for (int j = 0; j < across; ++j) in[i][j] = load(planes + (i * across + j) * sizes.plane + first);
    transform<rows, across>(matrix, in, out);
}

template <int side>
void images_to_planes(const float* images, float* planes, const Sizes& sizes) {
    constexpr auto matrix = [](int i, int k) { return Winograd<side>::images[i][k]; };
    to_planes<side, side + 2, side + 2, 1>(matrix, images, planes, sizes);
}

template <int side>
void gradient_to_planes(const float* gradient, float* planes, const Sizes& sizes) {
    constexpr auto matrix = [](int i, int k) { return Winograd<side>::outputs[k][i]; };
    to_planes<side, side, side + 2, 0>(matrix, gradient, planes, sizes);
}

template <int side>
void planes_to_outputs(const float* planes, float* outputs, const Sizes& sizes) {
    constexpr auto matrix = [](int i, int k) { return Winograd<side>::outputs[i][k]; };
    for_tiles(sizes, [&](int64_t line, int64_t column) {
        const Tile<side> tile(sizes, line, column, side, 0);
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            Lanes out[side][side];
            from_planes<side, side + 2>(matrix, planes, sizes, tile.first + c, out);
            for (int i = 0; i < side; ++i)
                for (int j = 0; j < side; ++j)
                    if (tile.offset[i][j] >= 0) store(out[i][j], outputs + tile.offset[i][j] + c);
        }
    });
}

// The tiles of an image overlap, and their parts add up, so one thread has all tiles of some channels of an image.
template <int side>
void planes_to_gradient(const float* planes, float* gradient, const Sizes& sizes) {
    constexpr auto matrix = [](int i, int k) { return Winograd<side>::images[k][i]; };
    constexpr int across = side + 2;
    const int64_t pixels = sizes.height * sizes.width;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t image = 0; image < sizes.images; ++image)
        for (int64_t c = 0; c < sizes.channels; c += LANES) {
            for (int64_t pixel = image * pixels; pixel < (image + 1) * pixels; ++pixel)
                store(Lanes{}, gradient + pixel * sizes.channels + c);
            for (int64_t line = image * sizes.down; line < (image + 1) * sizes.down; ++line)
                for (int64_t column = 0; column < sizes.across; ++column) {
                    const Tile<across> tile(sizes, line, column, side, 1);
                    Lanes out[across][across];
                    from_planes<across, across>(matrix, planes, sizes, tile.first + c, out);
                    for (int i = 0; i < across; ++i)
                        for (int j = 0; j < across; ++j) {
                            if (tile.offset[i][j] < 0) continue;
                            float* to = gradient + tile.offset[i][j] + c;
                            store(load(to) + out[i][j], to);
                        }
                }
        }
}

}  // namespace

#define EXPORT(name, side)                                                                                          \
    extern "C" void name##_##side(const float* from, float* to, int64_t images, int64_t height, int64_t width,      \
                                  int64_t channels) {                                                               \
        name<side>(from, to, Sizes(side, images, height, width, channels));                                         \
    }
#define EXPORT_ALL(side)             \
    EXPORT(images_to_planes, side)   \
    EXPORT(gradient_to_planes, side) \
    EXPORT(planes_to_outputs, side)  \
    EXPORT(planes_to_gradient, side)

EXPORT_ALL(2)
EXPORT_ALL(3)
EXPORT_ALL(4)

// Shared by the CPU kernels. build.py replaces their #include lines with this text.

#include <cstdint>
#include <cstring>
#include <vector>

#pragma GCC diagnostic ignored "-Wpsabi"  // about vector arguments, but all such functions are inlined

namespace {

struct bfloat16 {
    uint16_t bits;
};

// The bytes at `from` as a `To`.
template <typename To>
inline To read(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Round float32 bits, one number's or a vector's, to bfloat16 bits: to nearest even; NaN stays NaN.
template <typename Bits>
inline Bits round_to_bfloat16(Bits bits) {
    const Bits is_nan = ((bits & 0x7FFFFFFF) + 0x7FFFFF) >> 31;  // 1 or 0: a NaN's bits exceed infinity's
    bits += (0x7FFF + ((bits >> 16) & 1)) * (1 - is_nan);
    return (bits >> 16) | (is_nan << 6);
}

}  // namespace

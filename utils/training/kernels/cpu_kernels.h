// What the kernels for CPUs share. compilers.py puts this text in place of the lines that include it.

#include <cstdint>
#include <cstring>
#include <vector>

#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as arguments, but all such functions are inlined

namespace {

struct bfloat16 {
    uint16_t bits;
};

// The bits of float32 numbers, one or a vector of them, as those of bfloat16: to the nearest, of two to the even one; no
// number stays no number.
template <typename Bits>
inline Bits round_to_bfloat16(Bits bits) {
    const Bits is_no_number = ((bits & 0x7FFFFFFF) + 0x7FFFFF) >> 31;  // 1 or 0: such bits are more than infinity's
    bits += (0x7FFF + ((bits >> 16) & 1)) * (1 - is_no_number);
    return (bits >> 16) | (is_no_number << 6);
}

}  // namespace

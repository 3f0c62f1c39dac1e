// Bits of ZFP's fixed-rate blocks, the lowest of a word first.
#pragma once
#include "codec/zfp.cuh"

namespace codec {

// Words that one thread fills in order.
struct Writer {
    u32* at;
    u64 buffer = 0;
    int held = 0;

    __device__ explicit Writer(void* first) : at(static_cast<u32*>(first)) {}
    // At most 32 bits; those of `code` above `length` are zero.
    __device__ __forceinline__ void put(u32 code, int length) {
        buffer |= static_cast<u64>(code) << held;
        held += length;
        if (held < 32) return;
        *at++ = static_cast<u32>(buffer);
        buffer >>= 32;
        held -= 32;
    }
    __device__ __forceinline__ void skip(int length) {
        for (; length > 0; length -= 32) put(0, min(length, 32));
    }
};

// The words that one thread reads in order; it reads none past the last.
struct Reader {
    const u32* at;
    int words, used = 0;  // of `low`, used < 32
    u32 low = 0, high = 0;

    __device__ Reader(const void* first, int count) : at(static_cast<const u32*>(first)), words(count) {
        low = load();
        high = load();
    }
    __device__ __forceinline__ u32 load() { return words-- > 0 ? *at++ : 0; }
    // The next 32 bits; behind the last word zeros.
    __device__ __forceinline__ u32 next() const { return __funnelshift_r(low, high, used); }
    // At most 32 bits.
    __device__ __forceinline__ void drop(int length) {
        used += length;
        if (used < 32) return;
        used -= 32;
        low = high;
        high = load();
    }
    __device__ __forceinline__ void skip(int length) {
        for (; length > 0; length -= 32) drop(min(length, 32));
    }
};

}  // namespace codec

// Bits of ZFP's fixed-rate blocks, the lowest of a word first.
#pragma once
#include "codec_values.cuh"

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
    int words;
    u64 buffer = 0;
    int held = 0;

    __device__ Reader(const void* first, int count) : at(static_cast<const u32*>(first)), words(count) { refill(); }
    __device__ __forceinline__ void refill() {
        if (held > 32 || words == 0) return;
        buffer |= static_cast<u64>(*at++) << held;
        held += 32;
        --words;
    }
    __device__ __forceinline__ u32 next() const { return static_cast<u32>(buffer); }
    // At most 31 bits.
    __device__ __forceinline__ void drop(int length) {
        buffer >>= length;
        held -= length;
        refill();
    }
    __device__ __forceinline__ u32 take(int length) {
        const u32 bits = next() & ((1u << length) - 1);
        drop(length);
        return bits;
    }
    __device__ __forceinline__ void skip(int length) {
        for (; length > 0; length -= 31) drop(min(length, 31));
    }
};

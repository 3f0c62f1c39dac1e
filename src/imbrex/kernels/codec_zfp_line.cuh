// The embedded coding of ZFP's blocks of 4 values. A block is at most 64 bits, which a thread holds in one word.
//
// Where coefficient 3 is significant, planes are written as they are: 16 of them come from one transposition. Those before, three of
// them in white noise, go through a table of what two planes at once become, and one plane at a time on the way back.
#pragma once
#include "codec_zfp_bits.cuh"

constexpr int kSharedBytes = 4096;
constexpr u32 kStates = 0x1c00;  // of a table's entry: how many coefficients are significant, times 1024: where its rows begin
constexpr u32 kAll = 0x1000;

struct Table {
    u32 entry[1024];
};

struct PlaneCode {
    u32 code;
    int length, significant;
};

// Bits of a plane whose first `n` coefficients are significant: 0b0100 with n = 0 becomes 1, 0, 0, 1 and 0 for the rest, and n = 3.
constexpr PlaneCode code_of(u32 bits, int n) {
    u32 code = bits & ((1u << n) - 1);
    int length = n;
    while (n < 4) {
        const bool some = bits >> n != 0;
        code |= static_cast<u32>(some) << length++;
        if (!some) break;
        for (; n < 3 && !(bits >> n & 1); ++n) ++length;
        if (n < 3) code |= 1u << length++;
        ++n;
    }
    return {code, length, n};
}

// By n and two planes, the upper one in the low bits: its code from bit 21 on, what it makes of n, its length in the lowest four.
constexpr Table encoding() {
    Table table{};
    for (int n = 0; n < 4; ++n)
        for (u32 both = 0; both < 256; ++both) {
            const PlaneCode first = code_of(both & 15, n), second = code_of(both >> 4, first.significant);
            const u32 code = first.code | second.code << first.length;
            table.entry[256 * n + both] = code << 21 | static_cast<u32>(second.significant) << 10 | (first.length + second.length);
        }
    return table;
}

// The inverse for a single plane. By n and the next 7 bits with a 1 behind the last there is: the plane, a bit a byte, what it makes
// of n, and from bit 27 on how many bits it took. Where the block ends within a run, the place it has come to counts as a 1.
constexpr Table decoding() {
    Table table{};
    for (int n = 0; n < 4; ++n)
        for (u32 window = 1; window < 256; ++window) {
            int left = 0, at = 0, significant = n;
            while (window >> (left + 1)) ++left;
            u32 plane = 0;
            for (; at < n && at < left; ++at) plane |= (window >> at & 1) << 8 * at;
            while (significant < 4 && at < left && (window >> at++ & 1)) {
                while (significant < 3 && at < left && !(window >> at & 1)) ++significant, ++at;
                if (significant < 3 && at < left) ++at;
                plane |= 1u << 8 * significant++;
            }
            table.entry[256 * n + window] = static_cast<u32>(at) << 27 | static_cast<u32>(significant) << 10 | plane;
        }
    return table;
}

__device__ const Table encoding_table = encoding();
__device__ const Table decoding_table = decoding();

__device__ __forceinline__ const Table* decoding_rows() { return &decoding_table; }

// Bits `kStep` apart change places between two words.
template <int kStep, u32 kMask>
__device__ __forceinline__ void exchange(u32& a, u32& b) {
    const u32 low = (a & kMask) | ((b & kMask) << kStep);
    b = ((a >> kStep) & kMask) | (b & ~kMask);
    a = low;
}

// The upper 16 planes of four coefficients, four bits each, the top one in the lowest bits.
__device__ __forceinline__ u64 planes_of(const u32 (&c)[4]) {
    u32 a = __byte_perm(c[0], c[2], 0x7632), b = __byte_perm(c[1], c[3], 0x7632);
    exchange<1, 0x55555555u>(a, b);
    exchange<4, 0x0f0f0f0fu>(b, a);
    u32 even = __byte_perm(b, a, 0x5410), odd = __byte_perm(b, a, 0x7632);
    exchange<2, 0x33333333u>(even, odd);
    return static_cast<u64>(__byte_perm(even, odd, 0x0426)) << 32 | __byte_perm(even, odd, 0x1537);
}

// The inverse; the lower halves of the coefficients are zero.
__device__ __forceinline__ void coefficients_of(u64 planes, u32 (&c)[4]) {
    const u32 low = static_cast<u32>(planes), high = static_cast<u32>(planes >> 32);
    u32 even = __byte_perm(low, high, 0x1537), odd = __byte_perm(low, high, 0x0426);
    exchange<2, 0x33333333u>(even, odd);
    u32 b = __byte_perm(even, odd, 0x5410), a = __byte_perm(even, odd, 0x7632);
    exchange<4, 0x0f0f0f0fu>(b, a);
    exchange<1, 0x55555555u>(a, b);
    c[0] = a << 16, c[1] = b << 16, c[2] = a & 0xffff0000u, c[3] = b & 0xffff0000u;
}

struct Coder {
    const u8* table;

    __device__ explicit Coder(const Table* from) {
        u32* shared = reinterpret_cast<u32*>(ptx::shared_memory());
        for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads)
            reinterpret_cast<Quad*>(shared)[i] = reinterpret_cast<const Quad*>(from)[i];
        __syncthreads();
        table = ptx::shared_memory();
    }
    __device__ __forceinline__ u32 entry(u32 state, u32 index) const {
        return *reinterpret_cast<const u32*>(table + state + 4 * index);
    }

    // A block of 4 * rate bits: the header, then planes.
    __device__ __forceinline__ void write(u32 (&c)[4], u32 header, Writer& out, int rate) const {
        const int empty = __clz(c[0] | c[1] | c[2] | c[3]) & 31, budget = 4 * rate;
        u64 bits = header;
        int at = 9 + empty;
        u32 state = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] <<= empty;
#pragma unroll 1
        while (at < budget) {
            u64 planes = planes_of(c);
            int held = 64;
#pragma unroll 1
            while (state != kAll && held > 0 && at < budget) {
                const u32 both = entry(state, static_cast<u32>(planes) & 255);
                bits |= static_cast<u64>(both >> 21) << at;
                at += both & 15, state = both & kStates;
                planes >>= 8, held -= 8;
            }
            if (state == kAll && at < budget) bits |= planes << at, at += held;
#pragma unroll
            for (int i = 0; i < 4; ++i) c[i] <<= 16;
        }
        out.block(bits, budget);
    }

    // What lies behind the header of a block, `left` bits.
    __device__ __forceinline__ void read(u32 (&c)[4], u64 bits, int left) const {
        const u64 end = 1ull << left;
        bits = (bits & (end - 1)) | end;
        const int empty = __ffsll(static_cast<i64>(bits)) - 1;
        bits >>= empty, left -= empty;
        u32 state = 0, bytes = 0;
        int deep = 32 - empty, held = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = 0;
#pragma unroll 1
        while (state != kAll && left > 0) {
            const u32 low = static_cast<u32>(bits);
            const u32 plane = entry(state, left < 7 ? low : 128 | (low & 127)), length = plane >> 27;
            bits >>= length, left -= static_cast<int>(length);
            bytes = bytes << 1 | (plane & 0x01010101u);
            state = plane & kStates;
            if (++held == 8) gather(c, bytes, held, deep);
        }
        gather(c, bytes, held, deep);
        if (left <= 0) return;
        u32 rest[4];
        coefficients_of(bits ^ 1ull << left, rest);
        const int done = min(32 - deep, 31);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] |= rest[i] >> done;
    }

    // `held` planes, a byte a coefficient, go to where they belong: below bit `deep`.
    __device__ static void gather(u32 (&c)[4], u32& bytes, int& held, int& deep) {
        deep -= held;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 byte = bytes >> 8 * i & 255;
            if (deep >= 0) c[i] |= byte << deep;
            else c[i] |= byte >> min(-deep, 31);
        }
        bytes = 0, held = 0;
    }
};

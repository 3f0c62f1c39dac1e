// ZFP at a fixed rate, to the bit what `imbrex.codec.zfp` and the zfp library write. DIMENSIONS 1: blocks of 4, 2: of 4 x 4.
//
// A thread takes 32 values that follow each other, two or eight blocks, which are `rate` whole words at any rate: no two threads
// share a word, and nothing is added atomically. Counted for rate 8 in 2-D, operations of the integer pipe a value: magnitudes 2,
// to fixed point 1, lifting 8, negabinary 2, planes by a transposition of 16 x 16 bits 10, coding 30: 53, of which an H200 does
// 0.28e12 values a second, 20 % of its copy bandwidth at three bytes a value.
#include "codec_zfp_bits.cuh"

constexpr int kThreads = 128, kSize = DIMENSIONS == 2 ? 16 : 4, kPiece = 32, kPlanes = 32;
constexpr u32 kNegabinary = 0xaaaaaaaau;
#define SEQUENCY {0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }

__device__ __forceinline__ void lift(int& x, int& y, int& z, int& w) {
    x = (x + w) >> 1, w -= x;
    z = (z + y) >> 1, y -= z;
    x = (x + z) >> 1, z -= x;
    w = (w + y) >> 1, y -= w;
    w += y >> 1, y -= w >> 1;
}

__device__ __forceinline__ int half(u32 v) { return static_cast<int>(v) >> 1; }

__device__ __forceinline__ void unlift(u32& x, u32& y, u32& z, u32& w) {
    y += half(w), w -= half(y);
    y += w, w = 2 * w - y;
    z += x, x = 2 * x - z;
    y += z, z = 2 * z - y;
    w += x, x = 2 * x - w;
}

// Bit c of word r becomes bit r of word c, in the lower and the upper halves of 16 words alike. Its own inverse.
__device__ __forceinline__ void transpose(u32 (&w)[16]) {
    constexpr u32 masks[4] = {0x00ff00ffu, 0x0f0f0f0fu, 0x33333333u, 0x55555555u};
#pragma unroll
    for (int stage = 0; stage < 4; ++stage) {
        const int step = 8 >> stage;
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            if (k & step) continue;
            const u32 t = ((w[k] >> step) ^ w[k + step]) & masks[stage];
            w[k + step] ^= t;
            w[k] ^= t << step;
        }
    }
}

// The planes of a block: plane k holds bit k of its coefficients. 2-D planes lie in shared memory, two to a word.
struct Planes {
    u32 own[DIMENSIONS == 2 ? 1 : kSize];
    u32* shared;

    __device__ Planes() { shared = reinterpret_cast<u32*>(ptx::shared_memory()) + threadIdx.x; }
    __device__ __forceinline__ void write(const u32 (&coefficients)[kSize]) {
#if DIMENSIONS == 2
        u32 words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = coefficients[i];
        transpose(words);
#pragma unroll
        for (int i = 0; i < 16; ++i) shared[i * kThreads] = words[i];
#else
#pragma unroll
        for (int i = 0; i < kSize; ++i) own[i] = coefficients[i];
#endif
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
            if (DIMENSIONS == 2) shared[i * kThreads] = 0;
            else own[i % (DIMENSIONS == 2 ? 1 : kSize)] = 0;
        }
    }
    __device__ __forceinline__ u32 plane(int k) const {
#if DIMENSIONS == 2
        return shared[(k & 15) * kThreads] >> (k & 16) & 0xffffu;
#else
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < kSize; ++i) bits |= (own[i] >> k & 1) << i;
        return bits;
#endif
    }
    __device__ __forceinline__ void deposit(int k, u32 bits) {
#if DIMENSIONS == 2
        shared[(k & 15) * kThreads] |= bits << (k & 16);
#else
#pragma unroll
        for (int i = 0; i < kSize; ++i) own[i] |= (bits >> i & 1) << k;
#endif
    }
    __device__ __forceinline__ void read(u32 (&coefficients)[kSize]) const {
#if DIMENSIONS == 2
        u32 words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = shared[i * kThreads];
        transpose(words);
#pragma unroll
        for (int i = 0; i < 16; ++i) coefficients[i] = words[i];
#else
#pragma unroll
        for (int i = 0; i < kSize; ++i) coefficients[i] = own[i];
#endif
    }
};

// Bits of the planes from the top one down, `left` of them; returns how many are still left.
__device__ __forceinline__ int code_planes(const Planes& planes, Writer& out, int left) {
    int significant = 0;
    for (int k = kPlanes - 1; k >= 0 && left > 0; --k) {
        const u32 bits = planes.plane(k);
        const int told = min(significant, left);
        out.put(bits & ((1u << told) - 1), told);
        left -= told;
        u32 rest = bits >> significant;
        while (significant < kSize && left > 0) {
            if (rest == 0) {
                out.put(0, 1);
                --left;
                break;
            }
            // A 1 for the test, the zeros before the next 1, and that 1, which goes unsaid in the last place.
            const int zeros = __ffs(rest) - 1, ends = significant + zeros < kSize - 1;
            const int length = min(1 + zeros + ends, left);
            out.put((1u | static_cast<u32>(ends) << (zeros + 1)) & ((1u << length) - 1), length);
            left -= length;
            significant += zeros + 1;
            rest >>= zeros + 1;
        }
    }
    return left;
}

__device__ __forceinline__ int decode_planes(Planes& planes, Reader& in, int left) {
    int significant = 0;
    for (int k = kPlanes - 1; k >= 0 && left > 0; --k) {
        const int told = min(significant, left);
        u32 bits = in.next() & ((1u << told) - 1);
        in.drop(told);
        left -= told;
        while (significant < kSize && left > 0) {
            const u32 window = in.next();
            if ((window & 1) == 0) {
                in.drop(1);
                --left;
                break;
            }
            // Behind the 1 zeros up to a 1, to the last place, or to the end of the block.
            const int most = min(kSize - 1 - significant, left - 1);
            const int zeros = __ffs(window >> 1 | 1u << most) - 1, used = 1 + zeros + (zeros < most);
            in.drop(used);
            left -= used;
            significant += zeros;
            bits |= 1u << significant++;
        }
        planes.deposit(k, bits);
    }
    return left;
}

__device__ __forceinline__ void encode_block(const float (&x)[kSize], Writer& out, Planes& planes, int budget) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7fffffffu);
    if (amax == 0) return out.skip(budget);
    if (amax >= kInfinity) {
        out.put(1, 9);
        return out.skip(budget - 9);
    }
    const int exponent = static_cast<int>(amax >> 23) - 126;
    out.put(1 + 2 * (exponent + 127), 9);
    // 2 ** (30 - exponent) may be too large for one float.
    const float once = power_of_two((30 - exponent) / 2), again = power_of_two(30 - exponent - (30 - exponent) / 2);
    int q[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[i] = static_cast<int>(__fmul_rn(__fmul_rn(x[i], once), again));
#pragma unroll
    for (int i = 0; i < kSize; i += 4) lift(q[i], q[i + 1], q[i + 2], q[i + 3]);
    u32 coefficients[kSize];
#if DIMENSIONS == 2
    constexpr int order[16] = SEQUENCY;
#pragma unroll
    for (int i = 0; i < 4; ++i) lift(q[i], q[i + 4], q[i + 8], q[i + 12]);
#pragma unroll
    for (int i = 0; i < kSize; ++i) coefficients[i] = (static_cast<u32>(q[order[i]]) + kNegabinary) ^ kNegabinary;
#else
#pragma unroll
    for (int i = 0; i < kSize; ++i) coefficients[i] = (static_cast<u32>(q[i]) + kNegabinary) ^ kNegabinary;
#endif
    planes.write(coefficients);
    out.skip(code_planes(planes, out, budget - 9));
}

__device__ __forceinline__ float value_of(u32 fixed, int exponent) {
    const float q = static_cast<float>(static_cast<int>(fixed));
    // Below, the result may be subnormal and would be rounded twice.
    if (exponent < -100) return static_cast<float>(static_cast<double>(static_cast<int>(fixed)) * 0x1p-130 * power_of_two(exponent + 100));
    const float once = power_of_two((exponent - 30) / 2), again = power_of_two(exponent - 30 - (exponent - 30) / 2);
    return clamped(__fmul_rn(__fmul_rn(q, once), again), 3.4028234663852886e38f);
}

__device__ __forceinline__ void decode_block(float (&x)[kSize], Reader& in, Planes& planes, int budget) {
    const u32 header = in.next() & 511;
    if ((header & 1) == 0 || header == 1) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = header & 1 ? __uint_as_float(kNan) : 0.0f;
        return in.skip(budget);
    }
    in.drop(9);
    planes.clear();
    in.skip(decode_planes(planes, in, budget - 9));
    u32 coefficients[kSize], q[kSize];
    planes.read(coefficients);
#if DIMENSIONS == 2
    constexpr int order[16] = SEQUENCY;
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[order[i]] = (coefficients[i] ^ kNegabinary) - kNegabinary;
#pragma unroll
    for (int i = 0; i < 4; ++i) unlift(q[i], q[i + 4], q[i + 8], q[i + 12]);
#else
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[i] = (coefficients[i] ^ kNegabinary) - kNegabinary;
#endif
#pragma unroll
    for (int i = 0; i < kSize; i += 4) unlift(q[i], q[i + 1], q[i + 2], q[i + 3]);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = value_of(q[i], static_cast<int>(header >> 1) - 127);
}

// Where a thread's piece lies.
struct Piece {
    int row, number;
    bool any;

    __device__ Piece(int num_rows, int width) {
        const u32 item = blockIdx.x * kThreads + threadIdx.x, pieces = static_cast<u32>(width) / kPiece;
        row = static_cast<int>(item / pieces), number = static_cast<int>(item % pieces);
        any = row < num_rows;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    encode_rows(const u8* rows, i64 stride, u8* encoded, i64 pitch, int num_rows, int width, int rate) {
    const Piece piece(num_rows, width);
    if (!piece.any) return;
    Planes planes;
    Writer out(encoded + piece.row * pitch + 4 * rate * piece.number);
#pragma unroll 1
    for (int block = 0; block < kPiece / kSize; ++block) {
        float x[kSize];
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
            Unit<4> unit;
            unit.load(rows + piece.row * stride, (piece.number * kPiece + block * kSize + i) / 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i + j] = unit.value(j);
        }
        encode_block(x, out, planes, kSize * rate);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_rows(const u8* encoded, i64 pitch, u8* rows, i64 stride, int num_rows, int width, int rate) {
    const Piece piece(num_rows, width);
    if (!piece.any) return;
    Planes planes;
    Reader in(encoded + piece.row * pitch + 4 * rate * piece.number, rate);
#pragma unroll 1
    for (int block = 0; block < kPiece / kSize; ++block) {
        float x[kSize];
        decode_block(x, in, planes, kSize * rate);
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
            const float four[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
            Unit<4> unit;
            unit.set(four);
            unit.store(rows + piece.row * stride, (piece.number * kPiece + block * kSize + i) / 4);
        }
    }
}

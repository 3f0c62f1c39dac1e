// ZFP at a fixed rate, to the bit what `imbrex.codec.zfp` and the zfp library write. DIMENSIONS 1: blocks of 4, 2: of 4 x 4.
//
// A thread takes 32 values that follow each other, two or eight blocks, which are `rate` whole words at any rate: no two threads
// share a word, and nothing is added atomically.
#include "codec_values.cuh"

constexpr int kThreads = 128, kSize = DIMENSIONS == 2 ? 16 : 4, kPiece = 32;
#if DIMENSIONS == 2
#include "codec_zfp_square.cuh"
#else
#include "codec_zfp_line.cuh"
#endif

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

__device__ __forceinline__ void fixed_point(const float (&x)[kSize], int exponent, int (&q)[kSize]) {
    if (exponent >= -97) {
        const float scale = power_of_two(30 - exponent);
#pragma unroll
        for (int i = 0; i < kSize; ++i) q[i] = static_cast<int>(__fmul_rn(x[i], scale));
    } else {  // the power is no float
        const float scale = power_of_two(-34 - exponent);
#pragma unroll
        for (int i = 0; i < kSize; ++i) q[i] = static_cast<int>(__fmul_rn(__fmul_rn(x[i], 0x1p64f), scale));
    }
}

__device__ __forceinline__ void encode_block(const float (&x)[kSize], Writer& out, const Coder& coder, int rate) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7fffffffu);
    if (amax == 0 || amax >= kInfinity) {
        out.put(amax == 0 ? 0 : 1, 9);
        return out.skip(kSize * rate - 9);
    }
    const int exponent = static_cast<int>(amax >> 23) - 126;
    int q[kSize];
    fixed_point(x, exponent, q);
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
    coder.write(coefficients, 1 + 2 * (exponent + 127), out, rate);
}

__device__ __forceinline__ void floating_point(const u32 (&q)[kSize], int exponent, float (&x)[kSize]) {
    if (exponent >= -90 && exponent <= 125) {
        const float scale = power_of_two(exponent - 30);
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = __fmul_rn(static_cast<float>(static_cast<int>(q[i])), scale);
    } else {  // a subnormal result may not be rounded twice, one too large is the largest float
        const double scale = exponent < 0 ? 0x1p-130 * power_of_two(exponent + 100) : 0x1p-30 * power_of_two(exponent - 1) * 2;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
            const double value = static_cast<int>(q[i]) * scale;
            x[i] = static_cast<float>(max(min(value, 0x1.fffffep127), -0x1.fffffep127));
        }
    }
}

__device__ __forceinline__ void decode_block(float (&x)[kSize], Reader& in, const Coder& coder, int rate) {
    const int budget = kSize * rate;
#if DIMENSIONS == 2
    const u32 header = in.next() & 511;
#else
    const u64 bits = in.block(budget);
    const u32 header = static_cast<u32>(bits) & 511;
#endif
    if ((header & 1) == 0 || header == 1) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = header & 1 ? __uint_as_float(kNan) : 0.0f;
#if DIMENSIONS == 2
        in.skip(budget);
#endif
        return;
    }
    u32 coefficients[kSize], q[kSize];
#if DIMENSIONS == 2
    in.drop(9);
    coder.read(coefficients, in, budget - 9);
    constexpr int order[16] = SEQUENCY;
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[order[i]] = (coefficients[i] ^ kNegabinary) - kNegabinary;
#pragma unroll
    for (int i = 0; i < 4; ++i) unlift(q[i], q[i + 4], q[i + 8], q[i + 12]);
#else
    coder.read(coefficients, bits >> 9, budget - 9);
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[i] = (coefficients[i] ^ kNegabinary) - kNegabinary;
#endif
#pragma unroll
    for (int i = 0; i < kSize; i += 4) unlift(q[i], q[i + 1], q[i + 2], q[i + 3]);
    floating_point(q, static_cast<int>(header >> 1) - 127, x);
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
    const Coder coder(&encoding_table);
    const Piece piece(num_rows, width);
    if (!piece.any) return;
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
        encode_block(x, out, coder, rate);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_rows(const u8* encoded, i64 pitch, u8* rows, i64 stride, int num_rows, int width, int rate) {
    const Coder coder(decoding_rows());
    const Piece piece(num_rows, width);
    if (!piece.any) return;
    Reader in(encoded + piece.row * pitch + 4 * rate * piece.number, rate);
#pragma unroll 1
    for (int block = 0; block < kPiece / kSize; ++block) {
        float x[kSize];
        decode_block(x, in, coder, rate);
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
            const float four[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
            Unit<4> unit;
            unit.set(four);
            unit.store(rows + piece.row * stride, (piece.number * kPiece + block * kSize + i) / 4);
        }
    }
}

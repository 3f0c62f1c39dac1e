// ZFP at a fixed rate in blocks of 4 x 4 values, to the bit what `imbrex.codec.zfp` and the zfp library
// write.
//
// A thread takes one block, or two at an odd rate: whole words, so that no two threads share one and nothing
// is added atomically.
// Planes come from a transposition, 16 at once, two to a word, and lie in shared memory, because where they
// are coded follows the bits. Of a plane, what lies behind the significant coefficients is coded by a table
// of what 8 bits become.
#include "codec/zfp_bits.cuh"

namespace codec {

constexpr int kThreads = 128, kSize = 16, kPairs = 8;
#define SEQUENCY {0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15}

struct Table {
    u32 entry[256];
};

// Behind each 1 comes a 1, which says that there are more: 0b100 becomes 0, 0, 1, 1. From bit 16 on how many
// bits that makes.
constexpr Table encoding() {
    Table table{};
    for (u32 bits = 0; bits < 256; ++bits) {
        u32 code = 0, length = 0;
        for (int i = 0; i < 8; ++i) {
            const u32 bit = bits >> i & 1;
            code |= 3 * bit << length, length += 1 + bit;
        }
        table.entry[bits] = code | length << 16;
    }
    return table;
}

__device__ const Table encoding_table = encoding();

// Words whose numbers differ in bit `kWord`.
template <int kWord, int kStep, u32 kMask>
__device__ __forceinline__ void exchange_words(u32 (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (!(i & kWord)) exchange<kStep, kMask>(w[i], w[i | kWord]);
}

// The upper 16 planes of 16 coefficients: word i holds planes 15 - 2i in its lower and 14 - 2i in its upper
// half.
__device__ __forceinline__ void planes_of(const u32 (&c)[16], u32 (&w)[8]) {
    u32 t[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) t[i] = __byte_perm(c[i], c[i + 8], 0x7632);
    exchange_words<1, 1, 0x55555555u>(t);
    exchange_words<2, 2, 0x33333333u>(t);
    exchange_words<4, 4, 0x0f0f0f0fu>(t);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const u32 low = __byte_perm(t[i + 1], t[i], 0x5410), high = __byte_perm(t[i + 1], t[i], 0x7632);
        t[i] = low, t[i + 1] = high;
    }
    exchange_words<1, 8, 0x00ff00ffu>(t);
    // Bit 0 of a word's number is now bit 3 of the plane's, and its bits 2 and 1 are the plane's.
#pragma unroll
    for (int i = 0; i < 8; ++i) w[7 - ((i & 1) << 2 | i >> 1)] = t[i];
}

__device__ __forceinline__ void coefficients_of(const u32 (&w)[8], u32 (&c)[16]) {
    u32 t[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) t[i] = w[7 - ((i & 1) << 2 | i >> 1)];
    exchange_words<1, 8, 0x00ff00ffu>(t);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const u32 low = t[i], high = t[i + 1];
        t[i + 1] = __byte_perm(low, high, 0x5410), t[i] = __byte_perm(low, high, 0x7632);
    }
    exchange_words<4, 4, 0x0f0f0f0fu>(t);
    exchange_words<2, 2, 0x33333333u>(t);
    exchange_words<1, 1, 0x55555555u>(t);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = t[i] << 16, c[i + 8] = t[i] & 0xffff0000u;
}

struct Coder {
    const u32* table;
    u32* pair;

    __device__ explicit Coder(const Table* from) {
        u32* shared = reinterpret_cast<u32*>(ptx::shared_memory());
        table = shared, pair = shared + 256 + threadIdx.x;
        if (from == nullptr) return;
        for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) shared[i] = from->entry[i];
        __syncthreads();
    }

    // One plane: what was significant as it is, then the rest by the table.
    __device__ __forceinline__ void write_plane(u32 plane, int& significant, int& left, Writer& out) const {
        const u32 rest = plane >> significant;
        u32 code = plane;
        int length = min(significant + 1, 16);
        if (rest != 0) {
            const u32 first = table[rest & 255], second = table[rest >> 8];
            const int split = static_cast<int>(first >> 16), top = 31 - __clz(rest);
            const u32 spread = (first & 0xffff) | (second & 0xffff) << split;
            // A 1 in the last place goes unsaid; behind any other the code says whether there are more.
            const int more = significant + top < 15;
            const int said = top + split + static_cast<int>(second >> 16) - 16 + more;
            const u32 rest_said = (1u | spread << 1) & ((1u << said) - 1);
            code = (plane & ((1u << significant) - 1)) | rest_said << significant;
            length = significant + said + more;
            significant += top + 1;
        }
        if (length > left) length = left, code &= (1u << left) - 1;
        out.put(code, length);
        left -= length;
    }

    // A block of 16 * rate bits: the header, then planes.
    __device__ __forceinline__ void write(u32 (&c)[16], u32 header, Writer& out, int rate) const {
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) any |= c[i];
        const int empty = __clz(any) & 31;
        int left = 16 * rate - kHeaderBits - empty, significant = 0;
        out.put(header, kHeaderBits);
        out.put(0, empty);
#pragma unroll
        for (int i = 0; i < 16; ++i) c[i] <<= empty;
#pragma unroll 1
        while (left > 0) {
            u32 planes[8];
            planes_of(c, planes);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) pair[i * kThreads] = planes[i];
#pragma unroll 1
            for (int i = 0; i < kPairs && left > 0; ++i) {
                const u32 both = pair[i * kThreads];
                if (significant == 16 && left >= 32) {
                    out.put(both, 32);
                    left -= 32;
                } else {
                    write_plane(both & 0xffff, significant, left, out);
                    write_plane(both >> 16, significant, left, out);
                }
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) c[i] <<= 16;
        }
    }

    __device__ __forceinline__ u32 read_plane(int& significant, int& left, Reader& in) const {
        const int told = min(significant, left);
        u32 plane = in.next() & ((1u << told) - 1);
        in.drop(told);
        left -= told;
        while (significant < 16 && left > 0) {
            const u32 window = in.next();
            if ((window & 1) == 0) {
                in.drop(1);
                --left;
                break;
            }
            // Behind the 1 zeros up to a 1, to the last place, or to the end of the block.
            const int most = min(15 - significant, left - 1);
            const int zeros = __ffs(window >> 1 | 1u << most) - 1, used = 1 + zeros + (zeros < most);
            in.drop(used);
            left -= used;
            significant += zeros;
            plane |= 1u << significant++;
        }
        return plane;
    }

    // What lies behind the header of a block, `left` bits.
    __device__ __forceinline__ void read(u32 (&c)[16], Reader& in, int left) const {
        const int empty = min(__ffs(in.next() | 0x80000000u) - 1, left);
        in.drop(empty);
        left -= empty;
        int significant = 0, done = empty;
#pragma unroll
        for (int i = 0; i < 16; ++i) c[i] = 0;
#pragma unroll 1
        while (left > 0 && done < 32) {
#pragma unroll 1
            for (int i = 0; i < kPairs; ++i) {
                u32 both = 0;
                if (significant == 16 && left >= 32) {
                    both = in.next();
                    in.drop(32);
                    left -= 32;
                } else if (left > 0) {
                    both = read_plane(significant, left, in);
                    both |= read_plane(significant, left, in) << 16;
                }
                pair[i * kThreads] = both;
            }
            u32 planes[8], halves[16];
#pragma unroll
            for (int i = 0; i < kPairs; ++i) planes[i] = pair[i * kThreads];
            coefficients_of(planes, halves);
#pragma unroll
            for (int i = 0; i < 16; ++i) c[i] |= halves[i] >> done;
            done += 16;
        }
        in.skip(left);
    }
};

__device__ __forceinline__ void encode_block(const float (&x)[kSize], Writer& out, const Coder& coder,
                                             int rate) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7fffffffu);
    const Header header(amax);
    if (!header.coded) {
        out.put(header.word(amax), kHeaderBits);
        return out.skip(kSize * rate - kHeaderBits);
    }
    int q[kSize];
    fixed_point(x, header.exponent, q);
#pragma unroll
    for (int i = 0; i < kSize; i += 4) lift(q[i], q[i + 1], q[i + 2], q[i + 3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) lift(q[i], q[i + 4], q[i + 8], q[i + 12]);
    constexpr int order[16] = SEQUENCY;
    u32 coefficients[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) coefficients[i] = to_negabinary(q[order[i]]);
    coder.write(coefficients, header.word(amax), out, rate);
}

__device__ __forceinline__ void decode_block(float (&x)[kSize], Reader& in, const Coder& coder, int rate) {
    const u32 header = in.next() & 511;
    if ((header & 1) == 0 || header == 1) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = header & 1 ? __uint_as_float(kNan) : 0.0f;
        return in.skip(kSize * rate);
    }
    in.drop(kHeaderBits);
    u32 coefficients[kSize], q[kSize];
    coder.read(coefficients, in, kSize * rate - kHeaderBits);
    constexpr int order[16] = SEQUENCY;
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[order[i]] = from_negabinary(coefficients[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) unlift(q[i], q[i + 4], q[i + 8], q[i + 12]);
#pragma unroll
    for (int i = 0; i < kSize; i += 4) unlift(q[i], q[i + 1], q[i + 2], q[i + 3]);
    floating_point(q, static_cast<int>(header >> 1) - 127, x);
}

// Where a thread's piece lies: one block, or two.
struct Piece {
    int row, number, blocks;

    __device__ Piece(int width, int rate) : blocks(1 + rate % 2) {
        const u32 item = blockIdx.x * kThreads + threadIdx.x,
                  pieces = static_cast<u32>(width) / (kSize * blocks);
        row = static_cast<int>(item / pieces), number = static_cast<int>(item % pieces);
    }
    __device__ i64 bytes(int rate) const { return static_cast<i64>(number) * blocks * kSize * rate / 8; }
    __device__ int unit(int block) const { return (number * blocks + block) * (kSize / 4); }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    encode_rows(const u8* rows, i64 stride, u8* encoded, i64 pitch, int num_rows, int width, int rate) {
    const Coder coder(&encoding_table);
    const Piece piece(width, rate);
    if (piece.row >= num_rows) return;
    Writer out(encoded + piece.row * pitch + piece.bytes(rate));
#pragma unroll 1
    for (int block = 0; block < piece.blocks; ++block) {
        float x[kSize];
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
            Unit<4> unit;
            unit.load(rows + piece.row * stride, piece.unit(block) + i / 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i + j] = unit.value(j);
        }
        encode_block(x, out, coder, rate);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_rows(const u8* encoded, i64 pitch, u8* rows, i64 stride, int num_rows, int width, int rate) {
    const Coder coder(nullptr);
    const Piece piece(width, rate);
    if (piece.row >= num_rows) return;
    Reader in(encoded + piece.row * pitch + piece.bytes(rate), piece.blocks * rate / 2);
#pragma unroll 1
    for (int block = 0; block < piece.blocks; ++block) {
        float x[kSize];
        decode_block(x, in, coder, rate);
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
            const float four[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
            Unit<4> unit;
            unit.set(four);
            unit.store(rows + piece.row * stride, piece.unit(block) + i / 4);
        }
    }
}

}  // namespace codec

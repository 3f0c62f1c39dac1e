// ZFP at a fixed rate in blocks of 4 values, to the bit what `imbrex.codec.zfp` and the zfp library write.
//
// A block is at most 64 bits: a thread codes it in one word. 32 blocks that follow each other belong to a
// warp, which loads and stores them side by side. Where coefficient 3 is significant, planes are written as
// they are: 16 of them come from one transposition. Those before, three of them in white noise, go through a
// table of what two planes at once become, and one at a time on the way back.
#include "codec/zfp.cuh"

namespace codec {

constexpr int kThreads = 128, kSpan = 32, kSpans = 8;  // kSpans: that a warp takes one after the other
constexpr int kTableBytes = 4096;
// Of a table's entry: how many coefficients are significant, times 1024: where its rows begin.
constexpr u32 kStates = 0x1c00;
constexpr u32 kAll = 0x1000;

struct Table {
    u32 entry[1024];
};

struct PlaneCode {
    u32 code;
    int length, significant;
};

// Bits of a plane whose first `n` coefficients are significant: 0b0100 with n = 0 becomes 1, 0, 0, 1 and 0
// for the rest, and n = 3.
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

// By n and two planes, the upper one in the low bits: its code from bit 21 on, what it makes of n, its length
// in the lowest four.
constexpr Table encoding() {
    Table table{};
    for (int n = 0; n < 4; ++n)
        for (u32 both = 0; both < 256; ++both) {
            const PlaneCode first = code_of(both & 15, n), second = code_of(both >> 4, first.significant);
            const u32 code = first.code | second.code << first.length;
            table.entry[256 * n + both] =
                code << 21 | static_cast<u32>(second.significant) << 10 | (first.length + second.length);
        }
    return table;
}

// The inverse for a single plane. By n and the next 7 bits with a 1 behind the last there is: the plane, a
// bit a byte, what it makes of n, and from bit 27 on how many bits it took. Where the block ends within a
// run, the place it has come to counts as a 1.
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
            table.entry[256 * n + window] =
                static_cast<u32>(at) << 27 | static_cast<u32>(significant) << 10 | plane;
        }
    return table;
}

__device__ const Table encoding_table = encoding();
__device__ const Table decoding_table = decoding();

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

// The table in shared memory.
struct Codes {
    const u8* rows;

    __device__ explicit Codes(const Table& from) {
        Quad* shared = reinterpret_cast<Quad*>(ptx::shared_memory());
        for (int i = static_cast<int>(threadIdx.x); i < kTableBytes / 16; i += kThreads)
            shared[i] = reinterpret_cast<const Quad*>(&from)[i];
        __syncthreads();
        rows = ptx::shared_memory();
    }
    __device__ __forceinline__ u32 entry(u32 state, u32 index) const {
        return *reinterpret_cast<const u32*>(rows + state + 4 * index);
    }
};

// Planes behind a header, up to `budget` bits; what lies above them is rubbish.
__device__ __forceinline__ u64 write_planes(u32 (&c)[4], u64 bits, int budget, const Codes& codes) {
    const int empty = __clz(c[0] | c[1] | c[2] | c[3]) & 31;
    int at = kHeaderBits + empty;
    u32 state = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] <<= empty;
#pragma unroll 1
    while (at < budget) {
        u64 planes = planes_of(c);
        int held = 64;
#pragma unroll 1
        while (state != kAll && held > 0 && at < budget) {
            const u32 both = codes.entry(state, static_cast<u32>(planes) & 255);
            bits |= static_cast<u64>(both >> 21) << at;
            at += both & 15, state = both & kStates;
            planes >>= 8, held -= 8;
        }
        if (state == kAll && at < budget) bits |= planes << at, at += held;
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] <<= 16;
    }
    return bits;
}

// `held` planes, a byte a coefficient, go to where they belong: below bit `deep`.
__device__ __forceinline__ void gather(u32 (&c)[4], u32& bytes, int& held, int& deep) {
    deep -= held;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 byte = bytes >> 8 * i & 255;
        c[i] |= deep >= 0 ? byte << deep : byte >> min(-deep, 31);
    }
    bytes = 0, held = 0;
}

// What lies behind a header, `left` bits.
__device__ __forceinline__ void read_planes(u32 (&c)[4], u64 bits, int left, const Codes& codes) {
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
        const u32 plane = codes.entry(state, left < 7 ? low : 128 | (low & 127)), length = plane >> 27;
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

__device__ __forceinline__ u64 encode_block(const Unit<4>& x, int rate, const Codes& codes) {
    const u32 amax = largest(x);
    const Header header(amax);
    if (!header.coded) return header.word(amax);
    const float values[4] = {x.value(0), x.value(1), x.value(2), x.value(3)};
    int q[4];
    fixed_point(values, header.exponent, q);
    lift(q[0], q[1], q[2], q[3]);
    u32 c[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = to_negabinary(q[i]);
    return write_planes(c, header.word(amax), 4 * rate, codes) & ~0ull >> (64 - 4 * rate);
}

__device__ __forceinline__ void decode_block(u64 bits, int rate, const Codes& codes, float (&x)[4]) {
    const u32 header = static_cast<u32>(bits) & 511;
    if ((header & 1) == 0 || header == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = header & 1 ? __uint_as_float(kNan) : 0.0f;
        return;
    }
    u32 q[4];
    read_planes(q, bits >> kHeaderBits, 4 * rate - kHeaderBits, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = from_negabinary(q[i]);
    unlift(q[0], q[1], q[2], q[3]);
    floating_point(q, static_cast<int>(header >> 1) - 127, x);
}

// Spans of 32 blocks, row by row; the last of a row may be half a one.
struct Spans {
    int row, span, lane, of_row, blocks;

    __device__ explicit Spans(int width) : lane(static_cast<int>(threadIdx.x) % 32), blocks(width / 4) {
        of_row = (blocks + kSpan - 1) / kSpan;
        const u32 first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * kSpans;
        row = static_cast<int>(first / of_row), span = static_cast<int>(first % of_row);
    }
    __device__ int block() const { return span * kSpan + lane; }
    __device__ void next() {
        if (++span == of_row) span = 0, ++row;
    }
};

// Words of a span from its blocks, each of 4 * rate bits, with two of zeros behind the last. inverse: 65536 /
// rate + 1.
__device__ __forceinline__ u32 word_of(const u64* blocks, int word, int rate, u32 inverse) {
    const int size = 4 * rate, block = static_cast<int>(8 * word * inverse >> 16),
              at = 32 * word - block * size, has = size - at;
    u64 bits = blocks[block] >> at;
    if (has < 32) bits |= blocks[block + 1] << has;
    if (has + size < 32) bits |= blocks[block + 2] << (has + size);
    return static_cast<u32>(bits);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    encode_rows(const u8* rows, i64 stride, u8* encoded, i64 pitch, int num_rows, int width, int rate) {
    const Codes codes(encoding_table);
    Spans at(width);
    u64* blocks = reinterpret_cast<u64*>(ptx::shared_memory() + kTableBytes) + threadIdx.x / 32 * (kSpan + 2);
    if (at.lane < 2) blocks[kSpan + at.lane] = 0;
    const u32 inverse = 65536u / rate + 1;
#pragma unroll 1
    for (int i = 0; i < kSpans && at.row < num_rows; ++i, at.next()) {
        Unit<4> x;
        x.clear();
        if (at.block() < at.blocks) x.load(rows + at.row * stride, at.block());
        blocks[at.lane] = encode_block(x, rate, codes);
        __syncwarp();
        u32* words = reinterpret_cast<u32*>(encoded + at.row * pitch) + at.span * 4 * rate;
        const int count = min(at.blocks - at.span * kSpan, kSpan) * rate / 8;
        for (int word = at.lane; word < count; word += 32) words[word] = word_of(blocks, word, rate, inverse);
        __syncwarp();
    }
}

// 64 bits of a row from bit `at` on; the first `size` of them count, and no word behind those is read.
__device__ __forceinline__ u64 bits_at(const u32* row, int at, int size) {
    const int first = at >> 5, last = (at + size - 1) >> 5, shift = at & 31;
    const u32 low = row[first], middle = first < last ? row[first + 1] : 0,
              high = first + 1 < last ? row[first + 2] : 0;
    return static_cast<u64>(__funnelshift_r(middle, high, shift)) << 32 | __funnelshift_r(low, middle, shift);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_rows(const u8* encoded, i64 pitch, u8* rows, i64 stride, int num_rows, int width, int rate) {
    const Codes codes(decoding_table);
    Spans at(width);
#pragma unroll 1
    for (int i = 0; i < kSpans && at.row < num_rows; ++i, at.next()) {
        if (at.block() >= at.blocks) continue;
        const u32* row = reinterpret_cast<const u32*>(encoded + at.row * pitch);
        float x[4];
        decode_block(bits_at(row, at.block() * 4 * rate, 4 * rate), rate, codes, x);
        Unit<4> unit;
        unit.set(x);
        unit.store(rows + at.row * stride, at.block());
    }
}

}  // namespace codec

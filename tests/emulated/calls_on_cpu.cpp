// What kernels call on the machine, whatever of it needs a library. It is compiled once, with the machine, and not with
// every kernel: of a second of g++ that was a third.
#include "machine_on_cpu.cpp"

namespace emu {

inline std::vector<std::pair<u8*, u8*>> tensors;
// A tensor that begins at 0 stands for all memory.
inline bool trusting() { return !tensors.empty() && tensors[0].first == nullptr; }
inline bool known(const u8* at, i64 bytes) {
    for (auto [begin, end] : tensors)
        if (at >= begin && at + bytes <= end) return true;
    return false;
}
inline bool is_tensor(const u8* base) {
    if (trusting()) return true;
    for (auto [begin, end] : tensors)
        if (base == begin) return true;
    return false;
}
alignas(16) inline const u8 zeros[16] = {};

// Calls `piece(shared address, global address or null)` for all 16-byte pieces of a box.
template <class Piece>
void walk(const TensorMap& map, u32 shared, const int (&at)[4], Piece piece) {
    const i64 lines = i64(map.box[1]) * map.box[2] * map.box[3];
    if (shared % (lines == 1 ? 128 : 1024)) fail("a swizzled box is not aligned to 1024 bytes, or one of a line to 128");
    if (map.box[0] * map.size != 128) fail("a swizzled box is not 128 bytes wide");
    for (int d = 0; d < map.rank; ++d)
        if ((at[d] >= map.sizes[d] || at[d] + map.box[d] <= 0) && !is_tensor(map.base)) fail("a box outside its tensor");
    u32 line = 0;
    for (int w = 0; w < map.box[3]; ++w)
        for (int z = 0; z < map.box[2]; ++z)
            for (int y = 0; y < map.box[1]; ++y, ++line)
                for (int x = 0; x * map.size < 128; x += 16 / map.size) {
                    const i64 position[4] = {at[0] + x, at[1] + y, at[2] + z, at[3] + w};
                    u8* global = map.base + position[0] * map.size;
                    bool inside = position[0] >= 0 && position[0] < map.sizes[0];
                    for (int d = 1; d < map.rank; ++d) {
                        inside = inside && position[d] >= 0 && position[d] < map.sizes[d];
                        global += position[d] * map.strides[d - 1];
                    }
                    if (inside && !known(global, 16)) fail("a piece of a box lies in no tensor");
                    piece(swizzled(shared + line * 128 + x * map.size), inside ? global : nullptr);
                }
}

float load_line(const float* from, bool read_only) {
    Room& room = static_cast<Room&>(*self().block);
    const uintptr_t at = reinterpret_cast<uintptr_t>(from), line = at / 128 * 128;
    auto [found, fresh] = (read_only ? room.read_only : room.lines).try_emplace(line);
    if (fresh) std::memcpy(found->second.data(), reinterpret_cast<const void*>(line), 128);
    float value;
    std::memcpy(&value, found->second.data() + (at - line), 4);
    return value;
}
void acquired() { static_cast<Room&>(*self().block).lines.clear(); }

Block& block_of_cluster(u32 rank, u32 cluster) {
    Block& block = *machine->blocks[self().block->first + self().block->index / cluster * cluster + rank];
    if (block.alive == 0) fail("a block of the cluster left before this access to its memory");
    return block;
}
void tiled_load(u32 target, const TensorMap& map, u32 barrier, const int (&at)[4], u32 blocks, u32 cluster) {
    for (u32 rank = 0; rank < cluster; ++rank) {
        if (blocks ? !(blocks >> rank & 1) : rank != self().block->index % cluster) continue;
        u8* memory = block_of_cluster(rank, cluster).shared;
        walk(map, target, at, [&](u32 shared, const u8* global) {
            machine->loads.push_back(
                {memory + shared, global ? global : zeros, 16, reinterpret_cast<u64*>(memory + barrier), {}});
        });
    }
}
void tiled_store(const TensorMap& map, u32 source, const int (&at)[4], bool add) {
    walk(map, source, at, [&](u32 shared, u8* global) {
        if (!global) return;
        own().open.push_back({global, self().block->shared + shared, 16, nullptr, {}});
        if (add) own().open.back().add = static_cast<int>(map.size);
    });
}

inline Products& own_products() { return static_cast<Room&>(*self().block).products[self().thread / 32]; }
inline void multiply_first(Products& all) {
    multiply(all.left.front());
    all.left.pop_front();
    ++all.done;
}
void fence_products() { own_products().fenced = true; }
void commit_products() { ++own_products().commits[(self().thread % 32)]; }
// The instruction is the whole warp's: no lane goes on before all its products are done.
void wait_products(u32 pending) {
    auto& all = own_products();
    const u32 lanes = warp_size(), commits = all.commits[(self().thread % 32)];
    if (own_warp().arrived + 1 == lanes) {
        while (!all.left.empty() && all.left.front().group + pending < commits) multiply_first(all);
        all.mood = draw() % 3;
    }
    __syncwarp();
}
// Products are done in their order, the first of them when all lanes ask for it, the last when it is waited for.
void queue_product(float* d, int columns, u64 a, u64 b, bool add, bool trans_a, bool trans_b, bool fp8) {
    auto& all = own_products();
    const u32 lane = (self().thread % 32), at = all.asked[lane]++ - all.done;
    if (!all.fenced) fail("wgmma without wgmma_fence");
    if (at == all.left.size()) all.left.push_back({columns, a, b, add, trans_a, trans_b, fp8, all.commits[lane]});
    auto& product = all.left[at];
    if (product.a != a || product.b != b || product.add != add) fail("lanes of a warp want different products");
    product.d[lane] = d;
    if (++product.asked < warp_size() || all.mood == 1 || (all.mood == 2 && draw() % 2)) return;
    while (!all.left.empty() && all.left.front().asked == warp_size()) multiply_first(all);
}
}  // namespace emu

extern "C" void forget() { emu::tensors.clear(); }
extern "C" void name(u8* begin, i64 bytes) { emu::tensors.push_back({begin, begin + bytes}); }
extern "C" emu::Event* events(i64* count) {
    *count = static_cast<i64>(emu::traced.events.size());
    return emu::traced.events.data();
}

u32 exchanged(u32 word, u32 from) {
    auto& words = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    words[emu::self().thread % 32] = word;
    __syncwarp();
    const u32 result = words[from % 32];
    __syncwarp();
    return result;
}

namespace ptx {

u64 global_timer() {
    return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch().count()) + emu::leapt;
}
void pause() {
    emu::self().patient = true;
    emu::nap(1 + emu::draw() % 4);
}

u32 load_acquire_sys(const u32* word) {
    const u32 value = *const_cast<volatile const u32*>(word);
    if (emu::machine->trace) emu::machine->trace->note(emu::kSeen, word, 4, value, emu::self().block->stream);
    return seen(value);
}
void store_relaxed_sys(u32* word, u32 value) {
    if (emu::machine->trace) emu::machine->trace->look();
    *word = value;
    if (emu::machine->trace) emu::machine->trace->note(emu::kSet, word, 4, value, emu::self().block->stream);
    emu::breathe();
}
void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    emu::check_bulk(source, target, bytes);
    emu::Copy copy{shared_memory() + target, static_cast<const u8*>(source), bytes, barrier_at(barrier), {}};
    copy.stream = emu::self().block->stream;
    emu::machine->loads.push_back(copy);
}
void bulk_store(void* target, u32 source, u32 bytes) {
    emu::check_bulk(target, source, bytes);
    emu::own().open.push_back({static_cast<u8*>(target), shared_memory() + source, bytes, nullptr, {}});
}
void bulk_commit() {
    emu::own().groups.push_back(std::move(emu::own().open));
    emu::own().open.clear();
    if (emu::draw() % 2)
        for (auto& copy : emu::own().groups.back()) emu::finish_store(copy);
}
void wait_for_reads(int pending) {
    auto& groups = emu::own().groups;
    for (int i = 0; i + pending < static_cast<int>(groups.size()); ++i)
        for (auto& copy : groups[i]) emu::read_store(copy);
}
void wait_for_stores(int pending) {
    auto& groups = emu::own().groups;
    while (static_cast<int>(groups.size()) > pending) {
        for (auto& copy : groups.front()) emu::finish_store(copy);
        groups.erase(groups.begin());
    }
}

// A copy lands when a wait says so, or at once, at random.
void ask_for(u32 to, const u8* source) {
    emu::check_bulk(source, to, 16);
    emu::own().asked.push_back({shared_memory() + to, source, 16, nullptr, {}});
    if (emu::draw() % 2) emu::finish_store(emu::own().asked.back());
}
void copy_commit() {
    emu::own().loading.push_back(std::move(emu::own().asked));
    emu::own().asked.clear();
}
void wait_for_copies(int pending) {
    auto& groups = emu::own().loading;
    while (static_cast<int>(groups.size()) > pending) {
        for (auto& copy : groups.front())
            if (!copy.done) emu::finish_store(copy);
        groups.erase(groups.begin());
    }
    // A lane's own copies may be late, and what it does with them, when the other lanes have gone on.
    if (emu::machine->unrest && emu::draw() % 256 == 0) emu::nap(1 + emu::draw() % 512);
}

// Bits of x >= 0, small enough, in a format of its own: to nearest even, with gradual underflow below 2^(1 - kBias).
template <int kMantissa, int kBias>
u32 round_small(float x) {
    constexpr long one = 1L << kMantissa;
    int exponent = x < std::ldexp(1.0f, 1 - kBias) ? 1 - kBias : std::ilogb(x);
    long units = std::lrint(std::ldexp(x, kMantissa - exponent));
    if (units == 2 * one) units = one, ++exponent;
    return static_cast<u32>(units < one ? units : (exponent + kBias) << kMantissa | (units - one));
}
// The finite value of such bits, without a sign.
template <int kMantissa, int kBias>
float value_small(u32 bits) {
    constexpr u32 one = 1u << kMantissa;
    const int exponent = static_cast<int>(bits >> kMantissa);
    const u32 mantissa = bits & (one - 1);
    return std::ldexp(static_cast<float>(exponent ? one + mantissa : mantissa), (exponent ? exponent : 1) - kBias - kMantissa);
}
// 448 is the largest.
u32 round_e4m3(float f) {
    const u32 sign = std::signbit(f) ? 0x80 : 0;
    const float x = std::fabs(f);
    if (std::isnan(f)) return 0x7f;
    return sign | (x >= 464.0f ? 0x7e : round_small<3, 7>(x));
}
float reciprocal(float x) {  // to an ulp, either way
    const float inverse = 1.0f / x;
    return std::isfinite(inverse) && inverse != 0.0f ? std::nextafter(inverse, emu::draw() % 2 ? INFINITY : 0.0f) : inverse;
}
float value_e4m3(u32 bits) {
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    if ((bits & 0x7f) == 0x7f) return std::nanf("");
    return sign * value_small<3, 7>(bits & 0x7f);
}
u32 round_f16(float f) {
    const u32 sign = std::signbit(f) ? 0x8000 : 0;
    const float x = std::fabs(f);
    if (std::isnan(f)) return 0x7fff;
    return sign | (x >= 65520.0f ? 0x7c00 : round_small<10, 15>(x));
}
float value_f16(u16 bits) {
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if ((bits & 0x7c00) == 0x7c00) return bits & 0x3ff ? std::nanf("") : sign * INFINITY;
    return sign * value_small<10, 15>(bits & 0x7fff);
}
// 57344 is the largest.
u32 round_e5m2(float f) {
    const u32 sign = std::signbit(f) ? 0x80 : 0;
    const float x = std::fabs(f);
    if (std::isnan(f)) return 0x7f;
    return sign | (x >= 61440.0f ? 0x7b : round_small<2, 15>(x));
}
float value_e5m2(u32 bits) {
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    return sign * value_small<2, 15>(bits & 0x7f);
}
void store_matrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    auto& rows = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32, words[4] = {m0, m1, m2, m3};
    rows[lane] = address;
    __syncwarp();
    for (u32 m = 0; m < 4; ++m) std::memcpy(shared_memory() + rows[8 * m + lane / 4] + lane % 4 * 4, &words[m], 4);
    __syncwarp();
}

void load_matrix_x4(u32 address, u32 (&m)[4]) {
    auto& rows = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32;
    rows[lane] = address;
    __syncwarp();
    for (u32 i = 0; i < 4; ++i) std::memcpy(&m[i], shared_memory() + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
    __syncwarp();
}
void load_matrix_x4_transposed(u32 address, u32 (&m)[4]) {
    auto& rows = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32;
    rows[lane] = address;
    __syncwarp();
    for (u32 i = 0; i < 4; ++i) {
        u16 both[2];
        for (u32 j = 0; j < 2; ++j)
            std::memcpy(&both[j], shared_memory() + rows[8 * i + lane % 4 * 2 + j] + lane / 4 * 2, 2);
        m[i] = both[0] | static_cast<u32>(both[1]) << 16;
    }
    __syncwarp();
}
// Lands like copy_async.
void copy_async_or_zero(u32 to, const void* from, bool wanted) {
    const u8* source = wanted ? static_cast<const u8*>(from) : emu::zeros;
    if (wanted && !emu::known(source, 16)) emu::fail("a piece lies in no tensor");
    emu::check_bulk(source, to, 16);
    emu::own().asked.push_back({shared_memory() + to, source, 16, nullptr, {}});
    if (emu::draw() % 2) emu::finish_store(emu::own().asked.back());
}
// Sums go through k in its order. PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto& words = emu::fragments[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32, mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(words[lane].data(), mine, sizeof mine);
    __syncwarp();
    const auto number = [&](u32 thread, u32 word, u32 k) {
        return k % 2 ? bf16_high(words[thread][word]) : bf16_low(words[thread][word]);
    };
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (u32 k = 0; k < 16; ++k)
            sum += number(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * number(column * 4 + k % 8 / 2, 4 + k / 8, k);
        d[i] += sum;
    }
    __syncwarp();
}

}  // namespace ptx

inline void emu::add_numbers(const Copy& copy) {
    for (u32 i = 0; i < copy.bytes; i += copy.add) {
        u32 before = 0, more = 0;
        std::memcpy(&before, copy.target + i, copy.add);
        std::memcpy(&more, copy.read.data() + i, copy.add);
        const int shift = copy.add == 2 ? 16 : 0;
        const float sum = __uint_as_float(before << shift) + __uint_as_float(more << shift);
        const u32 after = copy.add == 2 ? ptx::round_bf16(sum) : __float_as_uint(sum);
        std::memcpy(copy.target + i, &after, copy.add);
    }
}

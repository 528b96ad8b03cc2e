// Products and decoder layers for few query tokens on x86 CPUs with AVX2 or AVX-512.
//
// Compiled for this machine and called from cpu.py. Each sum over a row is computed by one thread in one order,
// which does not depend on the number of query tokens or threads, and masked keys add exact zeros. A token therefore
// gets the same bits whether it is decoded alone or verified in a draft tree.
//
// X: type of activations and of the KV cache; W: type of weight matrices. Sums are float32. Matrices are packed in
// panels of PANEL outputs, so that a product reads memory in order: [panel][inputs / G][PANEL][G], zeros at the ends.
// G is 2 where the processor multiplies pairs of bfloat16.

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SSBENCH_AVX512 1
using vec = __m512;
constexpr int L = 16, TILE_ROWS = 8, AHEAD = 0;  // TILE_ROWS: rows of x at a time, as many as registers hold
inline vec zero() { return _mm512_setzero_ps(); }
inline vec all(float v) { return _mm512_set1_ps(v); }
inline void store(float* p, vec v) { _mm512_storeu_ps(p, v); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }  // b if one of them is NaN
inline float sum(vec v) { return _mm512_reduce_add_ps(v); }
inline vec scale2(vec v, vec n) { return _mm512_scalef_ps(v, n); }
inline vec nearest(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec zero_below(vec v, vec x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), v);
}
#else
using vec = __m256;
constexpr int L = 8, TILE_ROWS = 6, AHEAD = 4096;  // AHEAD: bytes of prefetch
inline vec zero() { return _mm256_setzero_ps(); }
inline vec all(float v) { return _mm256_set1_ps(v); }
inline void store(float* p, vec v) { _mm256_storeu_ps(p, v); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
inline float sum(vec v) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline vec scale2(vec v, vec n) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return v * _mm256_castsi256_ps(e);
}
inline vec nearest(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec zero_below(vec v, vec x, float least) {
    return _mm256_and_ps(v, _mm256_cmp_ps(x, all(least), _CMP_NLT_UQ));
}
#endif

// e^x by Cephes' polynomial, relative error below 2e-7 for x <= 0; 0 below -87, NaN for NaN.
inline vec exponential(vec x) {
    vec bounded = larger(all(-87.0f), x), n = nearest(bounded * all(1.44269504f));
    vec r = fma(n, all(-0.693359375f), bounded);
    r = fma(n, all(2.12194440e-4f), r);
    vec p = fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r + all(1.0f));
    return zero_below(scale2(p, n), x, -87.0f);
}

#ifndef SSBENCH_AVX512
template <class T>
vec partly(const typename T::S* p, int n) {  // the first n entries, then zeros
    typename T::S part[L] = {};
    std::memcpy(part, p, n * sizeof(part[0]));
    return T::load(part);
}
#endif

struct F32 {
    using S = float;
    static float get(S v) { return v; }
    static S put(float v) { return v; }
#ifdef SSBENCH_AVX512
    static vec load(const S* p) { return _mm512_loadu_ps(p); }
    static vec load(const S* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
#else
    static vec load(const S* p) { return _mm256_loadu_ps(p); }
    static vec load(const S* p, int n) { return partly<F32>(p, n); }
#endif
};

struct F16 {
    using S = uint16_t;
#ifdef SSBENCH_AVX512
    static vec load(const S* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    static vec load(const S* p, int n) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
    }
#else
    static vec load(const S* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    static vec load(const S* p, int n) { return partly<F16>(p, n); }
#endif
};

struct BF16 {
    using S = uint16_t;
    static float get(S v) {
        uint32_t bits = (uint32_t)v << 16;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    }
    static S put(float v) {  // to the nearest, ties to even
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (S)((bits >> 16) | 0x40);  // NaN
        return (S)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
#ifdef SSBENCH_AVX512
    static vec widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
    static vec load(const S* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
    static vec load(const S* p, int n) { return widen(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)); }
#else
    static vec load(const S* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
    }
    static vec load(const S* p, int n) { return partly<BF16>(p, n); }
#endif
};

constexpr int LINE = 64;  // bytes of a cache line
constexpr long FAR = 1 << 20;  // bytes of a matrix; prefetching the smaller ones of a small model made one row 3 % slower
constexpr int PANEL = 2 * L;  // threads take one or two at a time: a thread whose core is busy takes fewer
constexpr int MOST_TOKENS = 256;  // as `cpu.MOST_ROWS`
constexpr int MOST_HEAD = 1024;  // as `cpu.HEAD_SIZE`

// Values of X in memory as float, where float is what is multiplied: one instruction then broadcasts an entry.
template <class X>
struct Widened {
    using S = float;
    static float get(S v) { return v; }
    static S put(float v) { return X::get(X::put(v)); }
};

// Multiplies G entries of a row of X by those of L outputs of W, and adds to L sums. Row: type of a product's rows.
template <class X, class W>
struct Pair {
    static constexpr int G = 1;
    using V = vec;
    using Row = Widened<X>;
    static V x(const float* p) { return all(*p); }
    static V x(const uint16_t* p) { return all(X::get(*p)); }  // keys
    template <class T>
    static V last(const T* p) { return x(p); }
    static V w(const typename W::S* p) { return W::load(p); }
    static void mac(vec& total, V a, V b) { total = fma(a, b, total); }
};

#if defined(SSBENCH_AVX512) && defined(__AVX512BF16__)
template <>
struct Pair<BF16, BF16> {
    static constexpr int G = 2;
    using V = __m512i;
    using Row = BF16;
    static V x(const uint16_t* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return _mm512_set1_epi32(pair);
    }
    static V last(const uint16_t* p) { return _mm512_set1_epi32(*p); }  // of an odd number: with a zero
    static V w(const uint16_t* p) { return _mm512_loadu_si512(p); }
    static void mac(vec& total, V a, V b) { total = _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b); }
};
#endif

template <class X, class W>
constexpr int group = Pair<X, W>::G;

template <class X, class W>
long panel_size(int k) {  // entries of one panel
    return (long)(k + group<X, W> - 1) / group<X, W> * group<X, W> * PANEL;
}

inline long panels(long outputs) { return (outputs + PANEL - 1) / PANEL; }

// Panels that a thread takes: the prefetch at the end of the first serves the second. Few panels are taken one by one.
inline int at_a_time(long outputs) { return AHEAD && panels(outputs) >= 64 ? 2 : 1; }

// Asks for pages of 2 MiB in memory that has not been written yet: reading it then takes fewer page walks.
inline void large_pages(void* memory, size_t bytes) {
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t from = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE, to = ((uintptr_t)memory + bytes) / PAGE * PAGE;
    if (from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);
}

template <class X, class W>
void pack(const typename W::S* w, long outputs, int k, typename W::S* to) {
    constexpr int G = group<X, W>;
    large_pages(to, panels(outputs) * panel_size<X, W>(k) * sizeof(*to));
    for (long p = 0; p < panels(outputs); p++)
        for (int i = 0; i < k; i += G)
            for (int n = 0; n < PANEL; n++)
                for (int g = 0; g < G; g++, to++) {
                    const long row = p * PANEL + n;
                    *to = row < outputs && i + g < k ? w[row * k + i + g] : 0;
                }
}

template <class X, class W>
using Row = typename Pair<X, W>::Row;

template <class X, class W>
using In = typename Row<X, W>::S;

// M rows of x [M, k] times a panel of V * L outputs: put(row, sums). far: the panel comes from memory, not from a cache.
template <class X, class W, int M, int V, class T, class Put>
inline void tile(const T* x, long ldx, const typename W::S* w, int k, bool far, Put put) {
    using P = Pair<X, W>;
    vec total[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) total[m][v] = zero();
    int i = 0;
#pragma GCC unroll 2
    for (; i + P::G <= k; i += P::G, w += V * L * P::G) {
        typename P::V b[V];
        if (AHEAD && far)
            for (int line = 0; line < (int)sizeof(*w) * V * L * P::G; line += LINE)
                _mm_prefetch((const char*)w + AHEAD + line, _MM_HINT_T0);
        for (int v = 0; v < V; v++) b[v] = P::w(w + v * L * P::G);
        for (int m = 0; m < M; m++) {
            const typename P::V a = P::x(x + m * ldx + i);
            for (int v = 0; v < V; v++) P::mac(total[m][v], a, b[v]);
        }
    }
    if (i < k)
        for (int m = 0; m < M; m++) {
            const typename P::V a = P::last(x + m * ldx + i);
            for (int v = 0; v < V; v++) P::mac(total[m][v], a, P::w(w + v * L * P::G));
        }
    for (int m = 0; m < M; m++) {
        float sums[V * L];
        for (int v = 0; v < V; v++) store(sums + v * L, total[m][v]);
        put(m, sums);
    }
}

#if defined(SSBENCH_AVX512) && defined(__AMX_BF16__)
#define SSBENCH_AMX 1
constexpr int AMX_ROWS = 16, AMX_INPUTS = 32;  // of a tile of x
const bool amx = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;

// Tiles 0, 1: sums; 2: x; 3, 4: weights; 5: the last, less than AMX_INPUTS inputs of x; 6, 7: their weights.
inline void configure_tiles(int rows, int pairs_left) {
    struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 0, 64, 64};
        uint8_t rows[16] = {};
    } shapes;
    for (int t : {0, 1, 2, 5}) shapes.rows[t] = (uint8_t)rows;
    shapes.rows[3] = shapes.rows[4] = AMX_INPUTS / 2;
    shapes.rows[6] = shapes.rows[7] = (uint8_t)std::max(pairs_left, 1);
    shapes.bytes[5] = (uint16_t)(4 * std::max(pairs_left, 1));
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}

// As `tiles`, by the processor's matrix unit. A row's sums do not depend on the number of rows.
template <int V, class Put>
inline void amx_tiles(const uint16_t* x, long ldx, long rows, const uint16_t* w, int k, Put put) {
    constexpr int PAIR_ROW = V * L * 2;  // entries of two inputs' weights
    const int whole = k / AMX_INPUTS * AMX_INPUTS, pairs_left = (k - whole + 1) / 2;
    alignas(64) float sums[V][AMX_ROWS][L];
    alignas(64) uint16_t last[AMX_ROWS][AMX_INPUTS] = {};
    for (long m = 0, configured = 0; m < rows; m += AMX_ROWS, x += AMX_ROWS * ldx) {
        const int count = (int)std::min<long>(AMX_ROWS, rows - m);
        for (int r = 0; r < count && pairs_left; r++)
            std::memcpy(last[r], x + r * ldx + whole, (k - whole) * sizeof(last[r][0]));
        if (count != configured) configure_tiles(count, pairs_left);
        configured = count;
        asm volatile("" ::: "memory");  // tile loads read what was written before
        _tile_zero(0);
        _tile_zero(1);
        const uint16_t* b = w;
        for (int i = 0; i < whole; i += AMX_INPUTS, b += AMX_INPUTS / 2 * PAIR_ROW) {
            _tile_loadd(2, x + i, ldx * 2);
            _tile_loadd(3, b, PAIR_ROW * 2);
            _tile_dpbf16ps(0, 2, 3);
            if constexpr (V == 2) {
                _tile_loadd(4, b + 2 * L, PAIR_ROW * 2);
                _tile_dpbf16ps(1, 2, 4);
            }
        }
        if (pairs_left) {
            _tile_loadd(5, last, sizeof(last[0]));
            _tile_loadd(6, b, PAIR_ROW * 2);
            _tile_dpbf16ps(0, 5, 6);
            if constexpr (V == 2) {
                _tile_loadd(7, b + 2 * L, PAIR_ROW * 2);
                _tile_dpbf16ps(1, 5, 7);
            }
        }
        _tile_stored(0, sums[0], sizeof(sums[0][0]));
        if constexpr (V == 2) _tile_stored(1, sums[1], sizeof(sums[0][0]));
        for (int r = 0; r < count; r++) {
            float of_row[V * L];
            for (int v = 0; v < V; v++) std::memcpy(of_row + v * L, sums[v][r], sizeof(sums[v][r]));
            put(m + r, of_row);
        }
    }
    _tile_release();
}
#endif

// All rows of x [rows, k] times a panel of V * L outputs: put(row, sums). As few tiles as possible, of similar heights.
template <class X, class W, int V, class T, class Put>
inline void tiles(const T* x, long ldx, long rows, const typename W::S* w, int k, bool far, Put put) {
#ifdef SSBENCH_AMX
    if constexpr (group<X, W> == 2)
        if (amx) return amx_tiles<V>(x, ldx, rows, w, k, put);
#endif
    for (long m = 0, height; m < rows; m += height, x += height * ldx) {
        auto shifted = [&](int r, const float* sums) { put(m + r, sums); };
        const long left = rows - m, count = (left + TILE_ROWS - 1) / TILE_ROWS;
        height = (left + count - 1) / count;
        switch (height) {
#ifdef SSBENCH_AVX512
            case 8: tile<X, W, 8, V>(x, ldx, w, k, far, shifted); break;
            case 7: tile<X, W, 7, V>(x, ldx, w, k, far, shifted); break;
#endif
            case 6: tile<X, W, 6, V>(x, ldx, w, k, far, shifted); break;
            case 5: tile<X, W, 5, V>(x, ldx, w, k, far, shifted); break;
            case 4: tile<X, W, 4, V>(x, ldx, w, k, far, shifted); break;
            case 3: tile<X, W, 3, V>(x, ldx, w, k, far, shifted); break;
            case 2: tile<X, W, 2, V>(x, ldx, w, k, far, shifted); break;
            default: tile<X, W, 1, V>(x, ldx, w, k, far, shifted); break;
        }
    }
}

template <class X, class W>
const typename W::S* panel_of(const void* packed, int k, long panel) {
    return (const typename W::S*)packed + panel * panel_size<X, W>(k);
}

}  // namespace

// As `cpu.Lora`: scale B A x is added to a product in the rows from `first` on. rank 0: nothing is.
struct Lora {
    const void *down, *up;  // A [rank, inputs], B [outputs, rank], packed
    int32_t rank, first;
    float scale;
};

namespace {

// B times low [rows, rank] of one panel -> [rows, PANEL].
template <class X, class W>
void expand(const Lora& lora, const In<X, W>* low, int rows, long panel, float* out) {
    tiles<X, W, PANEL / L>(low, lora.rank, rows, panel_of<X, W>(lora.up, lora.rank, panel), lora.rank, false,
        [&](long r, const float* sums) { std::memcpy(out + r * PANEL, sums, PANEL * sizeof(float)); });
}

// All rows of x [rows, k] times one panel of a packed matrix: put(row, output, value). lora, low: of `shrink`.
template <class X, class W, class Put>
inline void product(
    const In<X, W>* x, long ldx, int rows, const void* packed, int k, long outputs, long panel, Put put,
    const Lora* lora = nullptr, const In<X, W>* low = nullptr) {
    const long first = panel * PANEL;
    const int count = (int)std::min<long>(PANEL, outputs - first);
    const int plain = lora && lora->rank ? std::min(lora->first, rows) : rows;  // rows without LoRA
    float added[MOST_TOKENS * PANEL];
    if (plain < rows) expand<X, W>(*lora, low, rows - plain, panel, added);
    const bool far = panels(outputs) * panel_size<X, W>(k) * (long)sizeof(typename W::S) >= FAR;
    tiles<X, W, PANEL / L>(x, ldx, rows, panel_of<X, W>(packed, k, panel), k, far, [&](long r, const float* sums) {
        if (r < plain)
            for (int n = 0; n < count; n++) put((int)r, first + n, sums[n]);
        else
            for (int n = 0; n < count; n++) put((int)r, first + n, sums[n] + added[(r - plain) * PANEL + n]);
    });
}

// To: type of `out`.
template <class X, class To>
void rms_norm(const typename X::S* x, const typename X::S* weight, float eps, int h, typename To::S* out) {
    vec squares = zero();
    int i = 0;
    for (; i + L <= h; i += L) {
        vec v = X::load(x + i);
        squares = fma(v, v, squares);
    }
    if (i < h) {
        vec v = X::load(x + i, h - i);
        squares = fma(v, v, squares);
    }
    float factor = 1.0f / std::sqrt(sum(squares) / h + eps);
    for (i = 0; i < h; i++) out[i] = To::put(X::get(x[i]) * factor * (weight ? X::get(weight[i]) : 1.0f));
}

char* scratch(size_t bytes) {
    static thread_local std::vector<char> memory;
    if (memory.size() < bytes) memory.resize(bytes);
    return memory.data();
}

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Threads wait for each other after each phase of a call. Where another process takes a core, the thread on it comes
// milliseconds late, so for a while there is one thread less. The bits are the same.
constexpr int64_t MS = 1000000, LATE = MS, SHORTEST = 20 * MS, LONGEST = 640 * MS;
std::atomic<int64_t> fewer_until{0}, period{SHORTEST};

int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

int team(int threads) { return threads > 1 && now() < fewer_until ? threads - 1 : threads; }

class Phase {
    const bool first = omp_get_thread_num() == 0, many = omp_get_num_threads() > 1;
    int64_t since = first && many ? now() : 0;

  public:
    void end() {
        if (!many) return;
        const int64_t waiting = first ? now() : 0;
#pragma omp barrier
        if (!first) return;
        const int64_t done = now();
        if (done - waiting > LATE + waiting - since) {  // longer than the first thread's own work
            const bool again = done - fewer_until < period;  // soon after the last time
            period = again ? std::min<int64_t>(2 * period, LONGEST) : SHORTEST;
            fewer_until = done + period;
        }
        since = done;
    }
};

}  // namespace

// As `cpu.Layer`. Pointers may be null: norm1, head_norm, biases.
struct Layer {
    int32_t hidden, heads, kv_heads, d, inner;
    float eps1, eps2, eps_head, scale;
    const void *norm1, *qkv, *qkv_bias, *head_norm, *out, *out_bias, *norm2, *gate_up, *gate_up_bias, *down, *down_bias;
    Lora lora[4];  // of qkv, out, gate_up and down
    Lora adapter;  // of the MLP in the last rows: B SiLU(A norm2(x))
};

namespace {

template <class X>
inline float biased(float v, const void* bias, long n) {
    return bias ? v + X::get(((const typename X::S*)bias)[n]) : v;
}

template <class X, class W>
void linear(
    const void* x_, int rows, const void* w, const void* bias, int k, long outputs, void* out_, int threads) {
    auto x = (const typename X::S*)x_;
    auto out = (typename X::S*)out_;
    auto put = [&](int r, long n, float v) { out[r * outputs + n] = X::put(biased<X>(v, bias, n)); };
    const int size = team(threads);
    auto rows_in = (const In<X, W>*)x_;
    if constexpr (!std::is_same_v<In<X, W>, typename X::S>) {
        auto widened = (In<X, W>*)scratch(sizeof(In<X, W>) * rows * k);
        for (long i = 0; i < (long)rows * k; i++) widened[i] = X::get(x[i]);
        rows_in = widened;
    }
#pragma omp parallel num_threads(size) if (size > 1)
    {
        Phase phase;
#pragma omp for schedule(dynamic, at_a_time(outputs)) nowait
        for (long p = 0; p < panels(outputs); p++) product<X, W>(rows_in, k, rows, w, k, outputs, p, put);
        phase.end();
    }
}

// scale A x [q - first, rank] of the rows with a LoRA; every thread of a team calls it.
template <class X, class W>
void shrink(const Lora& lora, const In<X, W>* x, int k, int q, In<X, W>* low, Phase& phase) {
    if (lora.rank == 0 || lora.first >= q) return;
    auto put = [&](int r, long n, float v) { low[(long)r * lora.rank + n] = Row<X, W>::put(lora.scale * v); };
#pragma omp for schedule(dynamic, 1) nowait
    for (long p = 0; p < panels(lora.rank); p++)
        product<X, W>(x + (long)lora.first * k, k, q - lora.first, lora.down, k, lora.rank, p, put);
    phase.end();
}

template <class X>
void norm(const void* x, long rows, const void* weight, float eps, int h, void* y) {
    using S = typename X::S;
    for (long r = 0; r < rows; r++)
        rms_norm<X, X>((const S*)x + r * h, (const S*)weight, eps, h, (S*)y + r * h);
}

// Adds the values of all keys, weighted by scores [total, L], for R rows and V * L dimensions.
template <class X, int R, int V>
inline void weigh(const typename X::S* values, int d, int c, long total, const float* scores, float* out) {
    vec a[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) a[r][v] = zero();
    for (long j = 0; j < total; j++) {
        vec of_key[V];
        for (int v = 0; v < V; v++) {
            const int n = std::min(L, d - c - v * L);
            of_key[v] = n == L ? X::load(values + j * d + c + v * L) : X::load(values + j * d + c + v * L, n);
        }
        for (int r = 0; r < R; r++) {
            const vec p = all(scores[j * L + r]);
            for (int v = 0; v < V; v++) a[r][v] = fma(p, of_key[v], a[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + (r * V + v) * L, a[r][v]);
}

template <class X, int R, class To>
inline void weigh_rows(
    const typename X::S* values, int d, long total, const float* scores, const float* sums, int first, int count,
    const std::vector<typename To::S*>& to) {
    for (int c = 0; c < d;) {
        float out[R * 2 * L];
        const int wide = d - c > L ? 2 : 1;
        if (wide == 2)
            weigh<X, R, 2>(values, d, c, total, scores + first, out);
        else
            weigh<X, R, 1>(values, d, c, total, scores + first, out);
        for (int r = 0; r < count; r++)
            for (int i = 0; i < wide * L && c + i < d; i++)
                to[first + r][c + i] = To::put(out[r * wide * L + i] / sums[first + r]);
        c += wide * L;
    }
}

// Attention of up to L query rows [count, d] of one key-value head; to: where each one's result belongs. A row of the
// mask belongs to query row (first + r) % q. Lanes are query rows, and sums go over keys in their order.
template <class X, class To>
void attend_rows(
    const Layer& w, const typename X::S* query, const typename X::S* keys, const typename X::S* values,
    const typename X::S* mask, bool causal, int q, long past, int first, int count, std::vector<float>& memory,
    const std::vector<typename To::S*>& to) {
    constexpr int G = group<X, X>;
    const int d = w.d;
    const long total = past + q;
    memory.resize(total * L + (d + 1) * L);
    float* scores = memory.data();
    auto packed = (typename X::S*)(scores + total * L);  // [d / G, L, G]
    for (int i = 0; i < d; i += G)
        for (int r = 0; r < L; r++)
            for (int g = 0; g < G; g++)
                packed[(i / G * L + r) * G + g] = r < count && i + g < d ? query[(long)r * d + i + g] : 0;
    tiles<X, X, 1>(keys, d, total, packed, d, false, [&](long j, const float* sums) {
        std::memcpy(scores + j * L, sums, L * sizeof(float));
    });
    vec most = all(-INFINITY);
    const vec scale = all(w.scale);
    for (long j = 0; j < total; j++) {
        vec s = F32::load(scores + j * L) * scale;
        if (mask || (causal && j > past)) {
            float hidden[L] = {};
            for (int r = 0; r < count; r++) {
                const int row = (first + r) % q;
                hidden[r] = mask ? X::get(mask[row * total + j]) : j > past + row ? -INFINITY : 0.0f;
            }
            s += F32::load(hidden);
        }
        store(scores + j * L, s);
        most = larger(most, s);
    }
    vec of_rows = zero();
    for (long j = 0; j < total; j++) {
        const vec e = exponential(F32::load(scores + j * L) - most);
        store(scores + j * L, e);
        of_rows += e;
    }
    float sums[L];
    store(sums, of_rows);
    for (int r = 0; r < count; r += 4)
        switch (std::min(4, count - r)) {
            case 4: weigh_rows<X, 4, To>(values, d, total, scores, sums, r, 4, to); break;
            case 3: weigh_rows<X, 3, To>(values, d, total, scores, sums, r, 3, to); break;
            case 2: weigh_rows<X, 2, To>(values, d, total, scores, sums, r, 2, to); break;
            default: weigh_rows<X, 1, To>(values, d, total, scores, sums, r, 1, to); break;
        }
}

// turn: entries between two rows of cos and sin. residual: add x.
template <class X, class W>
void attend(
    const Layer& w, const void* x_, int q, void* y_, void* keys_, void* values_, long stride, long past,
    const void* cos_, const void* sin_, long turn, const void* mask_, bool causal, int threads, bool residual) {
    using S = typename X::S;
    using I = In<X, W>;
    const int h = w.hidden, d = w.d, groups = w.heads / w.kv_heads, all_heads = w.heads + 2 * w.kv_heads;
    const long wide = (long)all_heads * d, rows = (long)groups * q;
    auto x = (const S*)x_;
    auto y = (S*)y_;
    auto keys = (S*)keys_, values = (S*)values_;
    auto cos = (const S*)cos_, sin = (const S*)sin_, mask = (const S*)mask_;
    if (q > MOST_TOKENS) {
        for (long r = 0; r < q; r += MOST_TOKENS)
            attend<X, W>(
                w, x + r * h, (int)std::min<long>(MOST_TOKENS, q - r), y + r * h, keys, values, stride, past + r,
                cos + r * turn, sin + r * turn, turn, nullptr, causal, threads, residual);
        return;
    }
    const size_t qkv_bytes = padded(sizeof(S) * q * wide), query_bytes = padded(sizeof(S) * q * w.heads * d),
                 normed_bytes = padded(sizeof(I) * q * h), attended_bytes = padded(sizeof(I) * q * w.heads * d);
    char* memory = scratch(
        qkv_bytes + query_bytes + normed_bytes + attended_bytes +
        sizeof(I) * q * std::max(w.lora[0].rank, w.lora[1].rank));
    S *qkv = (S*)memory, *query = (S*)(memory + qkv_bytes);
    I *normed = (I*)(memory + qkv_bytes + query_bytes), *attended = (I*)((char*)normed + normed_bytes),
      *low = (I*)((char*)attended + attended_bytes);
    const long least = std::max<long>((rows + L - 1) / L, (threads + w.kv_heads - 1) / w.kv_heads);  // blocks of a head
    const int block = (int)((rows + least - 1) / least);
    const long blocks = (rows + block - 1) / block;
    const int size = team(threads);
#pragma omp parallel num_threads(size) if (size > 1)
    {
        Phase phase;
#pragma omp for schedule(static) nowait
        for (long r = 0; r < q; r++) {
            if (w.norm1)
                rms_norm<X, Row<X, W>>(x + r * h, (const S*)w.norm1, w.eps1, h, normed + r * h);
            else
                for (int i = 0; i < h; i++) normed[r * h + i] = Row<X, W>::put(X::get(x[r * h + i]));
        }
        phase.end();
        shrink<X, W>(w.lora[0], normed, h, q, low, phase);
        auto put = [&](int r, long n, float v) { qkv[r * wide + n] = X::put(biased<X>(v, w.qkv_bias, n)); };
#pragma omp for schedule(dynamic, at_a_time(wide)) nowait
        for (long p = 0; p < panels(wide); p++) product<X, W>(normed, h, q, w.qkv, h, wide, p, put, &w.lora[0], low);
        phase.end();
#pragma omp for schedule(static) nowait
        for (int i = 0; i < q * all_heads; i++) {
            const int r = i / all_heads, head = i % all_heads;
            const S* from = qkv + r * wide + (long)head * d;
            if (head >= w.heads + w.kv_heads) {
                std::memcpy(values + (head - w.heads - w.kv_heads) * stride + (past + r) * d, from, sizeof(S) * d);
                continue;
            }
            S* to = head < w.heads ? query + ((long)head * q + r) * d
                                   : keys + (head - w.heads) * stride + (past + r) * d;
            S head_normed[MOST_HEAD];
            if (w.head_norm) {
                rms_norm<X, X>(from, (const S*)w.head_norm + (long)head * d, w.eps_head, d, head_normed);
                from = head_normed;
            }
            for (int j = 0; j < d; j++) {
                const bool real = j < d / 2;
                const float turned = X::get(from[real ? j + d / 2 : j - d / 2]) * X::get(sin[r * turn + j]);
                to[j] = X::put(X::get(from[j]) * X::get(cos[r * turn + j]) + (real ? -turned : turned));
            }
        }
        phase.end();
#pragma omp for schedule(dynamic, 1) nowait
        for (long i = 0; i < blocks * w.kv_heads; i++) {
            static thread_local std::vector<float> buffer;
            static thread_local std::vector<I*> to;
            const int kv_head = (int)(i / blocks), first = (int)(i % blocks) * block;
            const int count = (int)std::min<long>(block, rows - first);
            to.resize(count);
            for (int r = 0; r < count; r++)
                to[r] = attended + ((long)((first + r) % q) * w.heads + kv_head * groups + (first + r) / q) * d;
            attend_rows<X, Row<X, W>>(
                w, query + ((long)kv_head * rows + first) * d, keys + kv_head * stride, values + kv_head * stride, mask,
                causal, q, past, first, count, buffer, to);
        }
        phase.end();
        const int k = w.heads * d;
        shrink<X, W>(w.lora[1], attended, k, q, low, phase);
        auto last = [&](int r, long n, float v) {
            const S out = X::put(biased<X>(v, w.out_bias, n));
            y[(long)r * h + n] = residual ? X::put(X::get(x[(long)r * h + n]) + X::get(out)) : out;
        };
#pragma omp for schedule(dynamic, at_a_time(h)) nowait
        for (long p = 0; p < panels(h); p++) product<X, W>(attended, k, q, w.out, k, h, p, last, &w.lora[1], low);
        phase.end();
    }
}

// decay: e^-|v|.
inline float silu(float v, float decay) { return v >= 0 ? v / (1.0f + decay) : v * decay / (1.0f + decay); }

// adapter_start: the first row with the adapter, which is added to the MLP or replaces it. residual: add x, which may be
// y.
template <class X, class W>
void mlp(
    const Layer& w, const void* x_, int q, void* y_, int adapter_start, bool replace_mlp, int threads, bool residual) {
    using S = typename X::S;
    using To = Row<X, W>;
    using I = In<X, W>;
    const int h = w.hidden, inner = w.inner, rank = w.adapter.rank;
    const int adapter_rows = q - adapter_start, mlp_rows = replace_mlp ? adapter_start : q;
    auto x = (const S*)x_;
    auto y = (S*)y_;
    if (q > MOST_TOKENS) {
        for (long r = 0; r < q; r += MOST_TOKENS) {
            const int count = (int)std::min<long>(MOST_TOKENS, q - r);
            const int start = (int)std::clamp<long>(adapter_start - r, 0, count);
            mlp<X, W>(w, x + r * h, count, y + r * h, start, replace_mlp, threads, residual);
        }
        return;
    }
    const size_t normed_bytes = padded(sizeof(I) * q * h), active_bytes = padded(sizeof(I) * q * inner);
    char* memory =
        scratch(normed_bytes + active_bytes + sizeof(I) * q * std::max({w.lora[2].rank, w.lora[3].rank, rank}));
    I *normed = (I*)memory, *active = (I*)(memory + normed_bytes), *low = (I*)(memory + normed_bytes + active_bytes);
    const int size = team(threads);
#pragma omp parallel num_threads(size) if (size > 1)
    {
        Phase phase;
#pragma omp for schedule(static) nowait
        for (int r = 0; r < q; r++)
            rms_norm<X, To>(x + (long)r * h, (const S*)w.norm2, w.eps2, h, normed + (long)r * h);
        phase.end();
        shrink<X, W>(w.lora[2], normed, h, q, low, phase);
        auto activate = [&](int r, long n, float v) {
            const float rounded = X::get(X::put(v));
            low[(long)r * rank + n] = To::put(silu(rounded, std::exp(-std::fabs(rounded))));
        };
#pragma omp for schedule(dynamic, 1) nowait
        for (long p = 0; p < (adapter_rows ? panels(rank) : 0); p++)
            product<X, W>(normed + (long)adapter_start * h, h, adapter_rows, w.adapter.down, h, rank, p, activate);
#pragma omp for schedule(dynamic, at_a_time(inner)) nowait
        for (long p = 0; p < (mlp_rows ? inner / PANEL : 0); p++) {
            const long from = p * PANEL, to = from + PANEL;
            float gate[MOST_TOKENS * PANEL];
            auto put = [&](int r, long n, float v) {
                gate[r * PANEL + n - from] = X::get(X::put(biased<X>(v, w.gate_up_bias, n)));
            };
            auto put_up = [&](int r, long n, float v) {
                active[(long)r * inner + n - inner] = To::put(biased<X>(v, w.gate_up_bias, n));
            };
            product<X, W>(normed, h, mlp_rows, w.gate_up, h, 2L * inner, p, put, &w.lora[2], low);
            product<X, W>(normed, h, mlp_rows, w.gate_up, h, 2L * inner, p + inner / PANEL, put_up, &w.lora[2], low);
            for (int r = 0; r < mlp_rows; r++)
                for (long n = from; n < to; n += L) {  // SiLU(gate) * up
                    float part[L], decay[L];
                    std::memcpy(part, gate + r * PANEL + n - from, sizeof(part));
                    for (int i = 0; i < L; i++) decay[i] = -std::fabs(part[i]);
                    vec e = exponential(F32::load(decay));
                    store(decay, e);
                    for (int i = 0; i < L; i++) {
                        I& gated = active[(long)r * inner + n + i];
                        gated = To::put(X::get(X::put(silu(part[i], decay[i]))) * To::get(gated));
                    }
                }
        }
        phase.end();
        shrink<X, W>(w.lora[3], active, inner, q, low, phase);
        auto add = [&](int r, long n, S out) {
            y[(long)r * h + n] = residual ? X::put(X::get(x[(long)r * h + n]) + X::get(out)) : out;
        };
#pragma omp for schedule(dynamic, at_a_time(h)) nowait
        for (long p = 0; p < panels(h); p++) {
            float adapted[MOST_TOKENS * PANEL];
            if (adapter_rows)
                product<X, W>(low, rank, adapter_rows, w.adapter.up, rank, h, p, [&](int r, long n, float v) {
                    if (replace_mlp)
                        add(adapter_start + r, n, X::put(v));
                    else
                        adapted[r * PANEL + n - p * PANEL] = X::get(X::put(v));
                });
            auto last = [&](int r, long n, float v) {
                S out = X::put(biased<X>(v, w.down_bias, n));
                if (r >= adapter_start) out = X::put(X::get(out) + adapted[(r - adapter_start) * PANEL + n - p * PANEL]);
                add(r, n, out);
            };
            product<X, W>(active, inner, mlp_rows, w.down, inner, h, p, last, &w.lora[3], low);
        }
        phase.end();
    }
}

}  // namespace

// Type pairs: 0 float32, 1 float32 activations with float16 weights, 2 bfloat16.
#define FOR_PAIR(pair, call) \
    switch (pair) { \
        case 0: { using X = F32; using W = F32; call; break; } \
        case 1: { using X = F32; using W = F16; call; break; } \
        default: { using X = BF16; using W = BF16; call; break; } \
    }

extern "C" {

// Number of entries of a packed matrix [outputs, k].
long ssbench_packed_size(int pair, long outputs, int k) {
    long size = 0;
    FOR_PAIR(pair, (size = panels(outputs) * panel_size<X, W>(k)))
    return size;
}

void ssbench_pack(int pair, const void* w, long outputs, int k, void* out) {
    FOR_PAIR(pair, (pack<X, W>((const W::S*)w, outputs, k, (W::S*)out)))
}

int ssbench_panel() { return PANEL; }

const char* ssbench_name() {
#ifdef SSBENCH_AMX
    if (amx) return "AMX BF16";
#endif
#if defined(SSBENCH_AVX512) && defined(__AVX512BF16__)
    return "AVX-512 BF16";
#elif defined(SSBENCH_AVX512)
    return "AVX-512";
#else
    return "AVX2";
#endif
}

// x [rows, k], w packed [outputs, k], bias [outputs] or null -> out [rows, outputs].
void ssbench_linear(
    int pair, const void* x, int rows, const void* w, const void* bias, int k, long outputs, void* out, int threads) {
    FOR_PAIR(pair, (linear<X, W>(x, rows, w, bias, k, outputs, out, threads)))
}

// x [q, hidden] -> y [q, hidden], attention's contribution. keys, values: [kv_heads, stride / d, d], of which `past`
// rows are filled and the next q are written. cos, sin: [q, d], or [1, d] of all rows with turn 0. mask: additive
// [q, past + q], or null: `causal` decides; with more than MOST_TOKENS rows the pass must be causal and without a mask.
void ssbench_attend(
    int pair, const Layer* w, const void* x, int q, void* y, void* keys, void* values, long stride, long past,
    const void* cos, const void* sin, long turn, const void* mask, int causal, int threads) {
    FOR_PAIR(pair, (attend<X, W>(
        *w, x, q, y, keys, values, stride, past, cos, sin, turn, mask, causal, threads, false)))
}

// The same, then the MLP, with both residual connections: x [q, hidden] -> y [q, hidden]. From row `adapter_start` on
// the adapter is added to the MLP, or replaces it.
void ssbench_layer(
    int pair, const Layer* w, const void* x, int q, void* y, void* keys, void* values, long stride, long past,
    const void* cos, const void* sin, long turn, const void* mask, int causal, int threads, int adapter_start,
    int replace_mlp) {
    FOR_PAIR(pair, (attend<X, W>(
        *w, x, q, y, keys, values, stride, past, cos, sin, turn, mask, causal, threads, true)))
    FOR_PAIR(pair, (mlp<X, W>(*w, y, q, y, adapter_start, replace_mlp, threads, true)))
}

// RMSNorm of x [rows, h] with a weight [h] -> y.
void ssbench_norm(int pair, const void* x, long rows, const void* weight, float eps, int h, void* y) {
    FOR_PAIR(pair, (norm<X>(x, rows, weight, eps, h, y)))
}

// x [q, hidden] -> y [q, hidden], the MLP's contribution. From row `adapter_start` on the adapter is added to it, or
// replaces it.
void ssbench_mlp(
    int pair, const Layer* w, const void* x, int q, void* y, int adapter_start, int replace_mlp, int threads) {
    FOR_PAIR(pair, (mlp<X, W>(*w, x, q, y, adapter_start, replace_mlp, threads, false)))
}

}  // extern "C"

// Products and decoder layers for few query tokens on x86 CPUs with AVX2 or AVX-512.
//
// Compiled for this machine and called from native_cpu.py. Each sum over a row is made by one thread in one order, which
// does not depend on the number of query tokens or threads, and masked keys add exact zeros. A token therefore gets
// the same bits whether it is decoded alone or verified in a draft tree.
//
// X: type of activations and of the KV cache; W: type of weight matrices. Sums are float32. Matrices are row-major
// [outputs, inputs], as torch has them.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SSBENCH_AVX512 1
using vec = __m512;
constexpr int L = 16, MOST_ROWS = 4;
inline vec zero() { return _mm512_setzero_ps(); }
inline vec all(float v) { return _mm512_set1_ps(v); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }  // b if one is NaN
inline float sum(vec v) { return _mm512_reduce_add_ps(v); }
inline vec scale2(vec v, vec n) { return _mm512_scalef_ps(v, n); }
inline vec nearest(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec zero_below(vec v, vec x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), v);
}
#else
using vec = __m256;
constexpr int L = 8, MOST_ROWS = 2;
inline vec zero() { return _mm256_setzero_ps(); }
inline vec all(float v) { return _mm256_set1_ps(v); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
inline float sum(vec v) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline vec scale2(vec v, vec n) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(v, _mm256_castsi256_ps(e));
}
inline vec nearest(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec zero_below(vec v, vec x, float least) {
    return _mm256_and_ps(v, _mm256_cmp_ps(x, all(least), _CMP_NLT_UQ));
}
#endif

// e^x by Cephes' polynomial, relative error below 2e-7 for x <= 0; 0 below -87, NaN for NaN.
inline vec exponential(vec x) {
    vec bounded = larger(all(-87.0f), x), n = nearest(mul(bounded, all(1.44269504f)));
    vec r = fma(n, all(-0.693359375f), bounded);
    r = fma(n, all(2.12194440e-4f), r);
    vec p = fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, all(1.0f)));
    return zero_below(scale2(p, n), x, -87.0f);
}

struct F32 {
    using S = float;
    static float get(S v) { return v; }
    static S put(float v) { return v; }
#ifdef SSBENCH_AVX512
    static vec load(const S* p) { return _mm512_loadu_ps(p); }
    static vec load(const S* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
#else
    static vec load(const S* p) { return _mm256_loadu_ps(p); }
    static vec load(const S* p, int n) {
        float part[L] = {};
        std::memcpy(part, p, n * sizeof(float));
        return load(part);
    }
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
    static vec load(const S* p, int n) {
        S part[L] = {};
        std::memcpy(part, p, n * sizeof(S));
        return load(part);
    }
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
    static vec load(const S* p, int n) {
        S part[L] = {};
        std::memcpy(part, p, n * sizeof(S));
        return load(part);
    }
#endif
};

// Multiplies a piece of a row of X by one of W and adds it to float32 sums.
template <class X, class W>
struct Pair {
    static constexpr int step = L;
    using XR = vec;
    using WR = vec;
    template <class... N>
    static XR x(const typename X::S* p, N... n) { return X::load(p, n...); }
    template <class... N>
    static WR w(const typename W::S* p, N... n) { return W::load(p, n...); }
    static void mac(vec& total, XR a, WR b) { total = fma(a, b, total); }
};

#if defined(SSBENCH_AVX512) && defined(__AVX512BF16__)
template <>
struct Pair<BF16, BF16> {
    static constexpr int step = 32;
    using XR = __m512i;
    using WR = __m512i;
    static XR x(const uint16_t* p) { return _mm512_loadu_si512(p); }
    static XR x(const uint16_t* p, int n) { return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p); }
    static WR w(const uint16_t* p) { return x(p); }
    static WR w(const uint16_t* p, int n) { return x(p, n); }
    static void mac(vec& total, XR a, WR b) { total = _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b); }
};
#endif

// M rows of x times N rows of w, of length k each: put(row, output, value).
template <class X, class W, int M, int N, class Put>
inline void tile(const typename X::S* x, long ldx, const typename W::S* w, long ldw, int k, Put put) {
    using P = Pair<X, W>;
    vec total[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) total[m][n] = zero();
    int i = 0;
    for (; i + P::step <= k; i += P::step) {
        typename P::WR b[N];
        for (int n = 0; n < N; n++) b[n] = P::w(w + n * ldw + i);
        for (int m = 0; m < M; m++) {
            typename P::XR a = P::x(x + m * ldx + i);
            for (int n = 0; n < N; n++) P::mac(total[m][n], a, b[n]);
        }
    }
    if (i < k) {
        for (int m = 0; m < M; m++) {
            typename P::XR a = P::x(x + m * ldx + i, k - i);
            for (int n = 0; n < N; n++) P::mac(total[m][n], a, P::w(w + n * ldw + i, k - i));
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) put(m, n, sum(total[m][n]));
}

template <class X, class W, int N, class Put>
inline void rows_of(const typename X::S* x, long ldx, int rows, const typename W::S* w, long ldw, int k, Put put) {
    int m = 0;
    auto shifted = [&](int r, int n, float v) { put(m + r, n, v); };
    for (; m + MOST_ROWS <= rows; m += MOST_ROWS) tile<X, W, MOST_ROWS, N>(x + m * ldx, ldx, w, ldw, k, shifted);
    switch (rows - m) {
        case 3: tile<X, W, 3, N>(x + m * ldx, ldx, w, ldw, k, shifted); break;
        case 2: tile<X, W, 2, N>(x + m * ldx, ldx, w, ldw, k, shifted); break;
        case 1: tile<X, W, 1, N>(x + m * ldx, ldx, w, ldw, k, shifted); break;
        default: break;
    }
}

// Outputs from..to-1 of x [rows, k] times w [.., k].
template <class X, class W, class Put>
inline void product(
    const typename X::S* x, long ldx, int rows, const typename W::S* w, long ldw, int k, long from, long to, Put put) {
    long n = from;
    auto shifted = [&](int r, int c, float v) { put(r, n + c, v); };
    for (; n + 4 <= to; n += 4) rows_of<X, W, 4>(x, ldx, rows, w + n * ldw, ldw, k, shifted);
    for (; n < to; n++) rows_of<X, W, 1>(x, ldx, rows, w + n * ldw, ldw, k, shifted);
}

constexpr long CHUNK = 32;  // outputs that a thread takes at a time: a thread that is held up takes fewer

inline long chunks(long outputs) { return (outputs + CHUNK - 1) / CHUNK; }

template <class X>
void rms_norm(const typename X::S* x, const typename X::S* weight, float eps, int h, typename X::S* out) {
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
    for (i = 0; i < h; i++) out[i] = X::put(X::get(x[i]) * factor * (weight ? X::get(weight[i]) : 1.0f));
}

char* scratch(size_t bytes) {
    static thread_local std::vector<char> memory;
    if (memory.size() < bytes) memory.resize(bytes);
    return memory.data();
}

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

// As `native_cpu.Layer`. Pointers may be null: biases, head_norm.
struct Layer {
    int32_t hidden, heads, kv_heads, d, inner;
    float eps1, eps2, eps_head, scale;
    const void *norm1, *qkv, *qkv_bias, *head_norm, *out, *out_bias, *norm2, *gate_up, *gate_up_bias, *down, *down_bias;
};

namespace {

template <class X>
inline float biased(float v, const void* bias, long n) {
    return bias ? v + X::get(((const typename X::S*)bias)[n]) : v;
}

template <class X, class W>
void linear(
    const void* x_, int rows, const void* w_, const void* bias, int k, long outputs, void* out_, int threads) {
    auto x = (const typename X::S*)x_;
    auto w = (const typename W::S*)w_;
    auto out = (typename X::S*)out_;
    auto put = [&](int r, long n, float v) { out[r * outputs + n] = X::put(biased<X>(v, bias, n)); };
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (long c = 0; c < chunks(outputs); c++)
        product<X, W>(x, k, rows, w, k, k, c * CHUNK, std::min(outputs, (c + 1) * CHUNK), put);
}

// Attention of the rows first..first+count-1 of one key-value head, which are groups x q query rows.
template <class X>
void attend_rows(
    const Layer& w, const typename X::S* query, const typename X::S* keys, const typename X::S* values,
    const typename X::S* mask, int q, long past, int kv_head, int first, int count, float* scores,
    typename X::S* attended) {
    using S = typename X::S;
    const int d = w.d, groups = w.heads / w.kv_heads;
    const long total = past + q;
    product<X, X>(query, d, count, keys, d, d, 0, total, [&](int r, long j, float v) { scores[r * total + j] = v; });
    float sums[MOST_ROWS];
    for (int r = 0; r < count; r++) {
        float* s = scores + r * total;
        const int row = (first + r) % q;
        const long visible = mask ? total : past + row + 1;  // causal without a mask
        float most = -INFINITY;
        for (long j = 0; j < visible; j++) {
            s[j] = s[j] * w.scale + (mask ? X::get(mask[row * total + j]) : 0.0f);
            most = std::max(most, s[j]);
        }
        for (long j = visible; j < total; j++) s[j] = -INFINITY;
        for (long j = 0; j < total; j += L) {
            const int n = (int)std::min<long>(L, total - j);
            float part[L];
            for (int i = 0; i < L; i++) part[i] = i < n ? s[j + i] - most : -INFINITY;
            vec e = exponential(F32::load(part));
            std::memcpy(part, &e, sizeof(part));
            std::memcpy(s + j, part, n * sizeof(float));
        }
        float of_row = 0.0f;  // in the order of keys: masked ones add zero
        for (long j = 0; j < total; j++) of_row += s[j];
        sums[r] = of_row;
    }
    for (int c = 0; c < d; c += 2 * L) {
        const int n0 = std::min(L, d - c), n1 = std::max(0, std::min(L, d - c - L));
        vec a[MOST_ROWS][2];
        for (int r = 0; r < count; r++) a[r][0] = a[r][1] = zero();
        for (long j = 0; j < total; j++) {
            const S* v = values + j * d + c;
            vec v0 = n0 == L ? X::load(v) : X::load(v, n0);
            vec v1 = n1 == L ? X::load(v + L) : n1 ? X::load(v + L, n1) : zero();
            for (int r = 0; r < count; r++) {
                vec p = all(scores[r * total + j]);
                a[r][0] = fma(p, v0, a[r][0]);
                a[r][1] = fma(p, v1, a[r][1]);
            }
        }
        for (int r = 0; r < count; r++) {
            float part[2 * L];
            std::memcpy(part, a[r], sizeof(part));
            const int row = (first + r) % q, head = kv_head * groups + (first + r) / q;
            S* to = attended + ((long)row * w.heads + head) * d + c;
            for (int i = 0; i < n0 + n1; i++) to[i] = X::put(part[i] / sums[r]);
        }
    }
}

template <class X, class W>
void attend(
    const Layer& w, const void* x_, int q, void* y_, void* keys_, void* values_, long stride, long past,
    const void* cos_, const void* sin_, const void* mask_, int threads) {
    using S = typename X::S;
    const int h = w.hidden, d = w.d, groups = w.heads / w.kv_heads, all_heads = w.heads + 2 * w.kv_heads;
    const long wide = (long)all_heads * d, total = past + q, rows = (long)groups * q;
    auto x = (const S*)x_;
    auto y = (S*)y_;
    auto keys = (S*)keys_, values = (S*)values_;
    auto cos = (const S*)cos_, sin = (const S*)sin_, mask = (const S*)mask_;
    const size_t normed_bytes = padded(sizeof(S) * q * h), qkv_bytes = padded(sizeof(S) * q * wide),
                 query_bytes = padded(sizeof(S) * q * w.heads * d);
    char* memory = scratch(normed_bytes + qkv_bytes + 2 * query_bytes);
    S *normed = (S*)memory, *qkv = (S*)(memory + normed_bytes), *query = (S*)(memory + normed_bytes + qkv_bytes),
      *attended = (S*)(memory + normed_bytes + qkv_bytes + query_bytes);
    int block = (int)std::min<long>(MOST_ROWS, std::max<long>(1, rows * w.kv_heads / (4 * threads)));
    const long blocks = (rows + block - 1) / block;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int r = 0; r < q; r++) {
            if (w.norm1)
                rms_norm<X>(x + (long)r * h, (const S*)w.norm1, w.eps1, h, normed + (long)r * h);
            else
                std::memcpy(normed + (long)r * h, x + (long)r * h, sizeof(S) * h);
        }
        auto put = [&](int r, long n, float v) { qkv[r * wide + n] = X::put(biased<X>(v, w.qkv_bias, n)); };
#pragma omp for schedule(dynamic, 1)
        for (long c = 0; c < chunks(wide); c++)
            product<X, W>(
                normed, h, q, (const typename W::S*)w.qkv, h, h, c * CHUNK, std::min(wide, (c + 1) * CHUNK), put);
#pragma omp for schedule(static)
        for (int one = 0; one < q * all_heads; one++) {
            const int r = one / all_heads, head = one % all_heads;
            const S* from = qkv + r * wide + (long)head * d;
            if (head >= w.heads + w.kv_heads) {
                std::memcpy(values + (head - w.heads - w.kv_heads) * stride + (past + r) * d, from, sizeof(S) * d);
                continue;
            }
            S* to = head < w.heads ? query + ((long)head * q + r) * d
                                   : keys + (head - w.heads) * stride + (past + r) * d;
            S own[1024];
            if (w.head_norm) {
                rms_norm<X>(from, (const S*)w.head_norm + (long)head * d, w.eps_head, d, own);
                from = own;
            }
            for (int i = 0; i < d; i++) {  // sin: its first half is negated
                const int other = i < d / 2 ? i + d / 2 : i - d / 2;
                to[i] = X::put(
                    X::get(from[i]) * X::get(cos[(long)r * d + i]) + X::get(from[other]) * X::get(sin[(long)r * d + i]));
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (long one = 0; one < blocks * w.kv_heads; one++) {
            static thread_local std::vector<float> scores;
            const int kv_head = (int)(one / blocks), first = (int)(one % blocks) * block;
            const int count = (int)std::min<long>(block, rows - first);
            if (scores.size() < (size_t)(count * total)) scores.resize(count * total);
            attend_rows<X>(
                w, query + ((long)kv_head * rows + first) * d, keys + kv_head * stride, values + kv_head * stride, mask,
                q, past, kv_head, first, count, scores.data(), attended);
        }
        const int k = w.heads * d;
        auto last = [&](int r, long n, float v) { y[(long)r * h + n] = X::put(biased<X>(v, w.out_bias, n)); };
#pragma omp for schedule(dynamic, 1)
        for (long c = 0; c < chunks(h); c++)
            product<X, W>(
                attended, k, q, (const typename W::S*)w.out, k, k, c * CHUNK, std::min<long>(h, (c + 1) * CHUNK), last);
    }
}

template <class X, class W>
void mlp(const Layer& w, const void* x_, int q, void* y_, int threads) {
    using S = typename X::S;
    const int h = w.hidden, inner = w.inner;
    auto x = (const S*)x_;
    auto y = (S*)y_;
    const size_t normed_bytes = padded(sizeof(S) * q * h);
    char* memory = scratch(normed_bytes + sizeof(S) * q * inner);
    S *normed = (S*)memory, *active = (S*)(memory + normed_bytes);
    auto matrix = (const typename W::S*)w.gate_up;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int r = 0; r < q; r++)
            rms_norm<X>(x + (long)r * h, (const S*)w.norm2, w.eps2, h, normed + (long)r * h);
#pragma omp for schedule(dynamic, 1)
        for (long c = 0; c < chunks(inner); c++) {
            const long from = c * CHUNK, to = std::min<long>(inner, from + CHUNK);
            float gate[32 * CHUNK];  // [q, CHUNK], as `native_cpu.MOST_ROWS` has it
            product<X, W>(normed, h, q, matrix, h, h, from, to, [&](int r, long n, float v) {
                gate[r * CHUNK + n - from] = X::get(X::put(biased<X>(v, w.gate_up_bias, n)));
            });
            product<X, W>(normed, h, q, matrix, h, h, from + inner, to + inner, [&](int r, long n, float v) {
                active[(long)r * inner + n - inner] = X::put(biased<X>(v, w.gate_up_bias, n));
            });
            for (int r = 0; r < q; r++)
                for (long n = from; n < to; n += L) {  // SiLU(gate) * up
                    const int count = (int)std::min<long>(L, to - n);
                    float part[L] = {}, grown[L];
                    std::memcpy(part, gate + r * CHUNK + n - from, count * sizeof(float));
                    for (int i = 0; i < L; i++) grown[i] = -std::fabs(part[i]);
                    vec e = exponential(F32::load(grown));
                    std::memcpy(grown, &e, sizeof(grown));
                    for (int i = 0; i < count; i++) {
                        const float g = part[i], s = g >= 0 ? g / (1.0f + grown[i]) : g * grown[i] / (1.0f + grown[i]);
                        S& to_ = active[(long)r * inner + n + i];
                        to_ = X::put(X::get(X::put(s)) * X::get(to_));
                    }
                }
        }
        auto last = [&](int r, long n, float v) { y[(long)r * h + n] = X::put(biased<X>(v, w.down_bias, n)); };
#pragma omp for schedule(dynamic, 1)
        for (long c = 0; c < chunks(h); c++)
            product<X, W>(
                active, inner, q, (const typename W::S*)w.down, inner, inner, c * CHUNK,
                std::min<long>(h, (c + 1) * CHUNK), last);
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

// x [rows, k], w [outputs, k], bias [outputs] or null -> out [rows, outputs].
void ssbench_linear(
    int pair, const void* x, int rows, const void* w, const void* bias, int k, long outputs, void* out, int threads) {
    FOR_PAIR(pair, (linear<X, W>(x, rows, w, bias, k, outputs, out, threads)))
}

// x [q, hidden] -> y [q, hidden], attention's contribution. keys, values: [kv_heads, stride / d, d], of which `past`
// rows are filled and the next q are written. cos, sin: [q, d]. mask: additive [q, past + q], or null for causal.
void ssbench_attend(
    int pair, const Layer* w, const void* x, int q, void* y, void* keys, void* values, long stride, long past,
    const void* cos, const void* sin, const void* mask, int threads) {
    FOR_PAIR(pair, (attend<X, W>(*w, x, q, y, keys, values, stride, past, cos, sin, mask, threads)))
}

// x [q, hidden] -> y [q, hidden], the MLP's contribution.
void ssbench_mlp(int pair, const Layer* w, const void* x, int q, void* y, int threads) {
    FOR_PAIR(pair, (mlp<X, W>(*w, x, q, y, threads)))
}

}  // extern "C"

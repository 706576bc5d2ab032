// Encode and decode float32 blocks. Every result has the bits of the numpy code beside this file:
// float32 operations round once each (no contraction), and sums run over integers, so that neither
// the order of additions nor the number of threads matters. The layouts stand in the Python files.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr float SMALLEST = 0x1p-100f; // a block below it is encoded as zeros
constexpr uint32_t LARGEST_BITS = 0x71800000u; // 2^100; NaN and infinity are above
constexpr float UNITS = 0x1p20f; // integer sums count in absmax · 2^-20

inline uint32_t bits(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b & 0x7fffffffu;
}

inline float from_bits(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

uint32_t largest(const float *x, int64_t m) {
    uint32_t most = 0;
    for (int64_t i = 0; i < m; i++) most = std::max(most, bits(x[i]));
    return most;
}

int64_t refused(const float *x, int64_t m) {
    int64_t i = 0;
    while (i < m && bits(x[i]) <= LARGEST_BITS) i++;
    return i;
}

inline void put(uint8_t *at, float x) { std::memcpy(at, &x, 4); }
inline float get(const uint8_t *at) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
}

// Bypass the caches, because `out` is far larger than they are and is read much later.
inline void stream(float *out, const float *values, int64_t m) {
    int64_t i = 0;
#ifdef __SSE2__
    if (((uintptr_t)out & 15) == 0)
        for (; i + 4 <= m; i += 4) _mm_stream_ps(out + i, _mm_load_ps(values + i));
#endif
    for (; i < m; i++) out[i] = values[i];
}

inline void end_stream() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

// out = value, or out += value · factor
template <class Value>
inline void emit(float *out, int64_t m, float factor, bool adds, Value value) {
    alignas(64) float values[256];
    if (!adds)
        for (int64_t first = 0; first < m; first += 256) {
            int64_t last = std::min<int64_t>(first + 256, m);
            for (int64_t i = first; i < last; i++) values[i - first] = value(i);
            stream(out + first, values, last - first);
        }
    else if (factor == 1.0f)
        for (int64_t i = 0; i < m; i++) out[i] += value(i);
    else
        for (int64_t i = 0; i < m; i++) out[i] += value(i) * factor;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// int8_block and int4_block: the scales of all blocks, then their codes

struct Int8 {
    static constexpr float steps = 127.0f;
    static constexpr int64_t bytes = 256;
    static void pack(const float *x, int64_t m, float inverse, uint8_t *q) {
        for (int64_t i = 0; i < m; i++) q[i] = (uint8_t)(int32_t)__builtin_rintf(x[i] * inverse);
    }
};

struct Int4 {
    static constexpr float steps = 7.0f;
    static constexpr int64_t bytes = 128;
    static void pack(const float *x, int64_t m, float inverse, uint8_t *q) {
        int64_t half = (m + 1) / 2;
        for (int64_t i = 0; i < half; i++) {
            int32_t low = (int32_t)__builtin_rintf(x[i] * inverse) + 8, high = 8;
            if (half + i < m) high = (int32_t)__builtin_rintf(x[half + i] * inverse) + 8;
            q[i] = (uint8_t)(low | high << 4);
        }
    }
};

template <class Int>
int64_t block_encode(const float *x, int64_t n, uint8_t *wire, int64_t first, int64_t last) {
    int64_t blocks = ceil_div(n, 256);
    for (int64_t b = first; b < last; b++) {
        const float *from = x + 256 * b;
        int64_t m = std::min<int64_t>(256, n - 256 * b);
        uint32_t most = m == 256 ? largest(from, 256) : largest(from, m);
        if (most > LARGEST_BITS) return 256 * b + refused(from, m);
        float absmax = from_bits(most);
        bool zero = absmax < SMALLEST;
        put(wire + 4 * b, zero ? 0.0f : absmax / Int::steps);
        float inverse = zero ? 0.0f : Int::steps / absmax;
        uint8_t *q = wire + 4 * blocks + Int::bytes * b;
        m == 256 ? Int::pack(from, 256, inverse, q) : Int::pack(from, m, inverse, q);
    }
    return -1;
}

// top_k_2bit

struct BitWriter {
    uint8_t *at;
    uint64_t held = 0;
    int num = 0;
    void write(uint32_t value, int width) {
        held |= (uint64_t)value << num;
        for (num += width; num >= 8; num -= 8, held >>= 8) *at++ = (uint8_t)held;
    }
    void flush() {
        if (num > 0) *at = (uint8_t)held;
    }
};

inline uint32_t read_bits(const uint8_t *from, int64_t bit, int width) {
    uint32_t value = 0;
    for (int i = 0; i < width; i++, bit++) value |= (uint32_t)(from[bit >> 3] >> (bit & 7) & 1) << i;
    return value;
}

constexpr int64_t TOP_BLOCK = 4096;

void top_k_pack(const float *x, int64_t m, int64_t k, float absmax, uint8_t *record) {
    uint64_t keys[TOP_BLOCK];
    for (int64_t i = 0; i < m; i++) keys[i] = (uint64_t)bits(x[i]) << 12 | (uint64_t)(4095 - i);
    std::nth_element(keys, keys + (k - 1), keys + m, [](uint64_t a, uint64_t b) { return a > b; });
    std::sort(keys, keys + k, [](uint64_t a, uint64_t b) { return (a & 4095) > (b & 4095); });
    float to_units = absmax >= SMALLEST ? UNITS / absmax : 0.0f;
    int64_t sum = 0, least = INT64_MAX, units[64];
    for (int64_t i = 0; i < k; i++) {
        units[i] = (int64_t)__builtin_rintf(from_bits((uint32_t)(keys[i] >> 12)) * to_units);
        sum += units[i];
        least = std::min(least, units[i]);
    }
    int64_t sums[2] = {0, 0}, counts[2] = {0, 0};
    BitWriter codes{record + 8}, places{record + 8 + ceil_div(k, 4)};
    for (int64_t i = 0; i < k; i++) {
        int is_high = least == 0 ? units[i] > 0 : units[i] * k > sum;
        sums[is_high] += units[i];
        counts[is_high]++;
        int64_t place = 4095 - (int64_t)(keys[i] & 4095);
        codes.write((uint32_t)is_high | (std::signbit(x[place]) ? 2u : 0u), 2);
        places.write((uint32_t)place, 12);
    }
    codes.flush();
    places.flush();
    for (int level = 0; level < 2; level++) {
        double mean = (double)sums[level] / (double)std::max<int64_t>(counts[level], 1);
        put(record + 4 * level, absmax >= SMALLEST ? (float)(mean * ((double)absmax * 0x1p-20)) : 0.0f);
    }
}

} // namespace

// encode: blocks first … last−1 of x[n] into wire. Return the index of a refused value, or −1.
// decode: the same blocks of wire into out[n].
extern "C" {

int64_t int8_block_encode(const float *x, int64_t n, uint8_t *wire, int64_t first, int64_t last) {
    return block_encode<Int8>(x, n, wire, first, last);
}

int64_t int4_block_encode(const float *x, int64_t n, uint8_t *wire, int64_t first, int64_t last) {
    return block_encode<Int4>(x, n, wire, first, last);
}

void int8_block_decode(const uint8_t *wire, int64_t n, float *out, float factor, int32_t adds,
                       int64_t first, int64_t last) {
    int64_t blocks = ceil_div(n, 256);
    for (int64_t b = first; b < last; b++) {
        float scale = get(wire + 4 * b);
        const int8_t *q = (const int8_t *)(wire + 4 * blocks + 256 * b);
        emit(out + 256 * b, std::min<int64_t>(256, n - 256 * b), factor, adds,
             [=](int64_t i) { return (float)q[i] * scale; });
    }
    if (!adds) end_stream();
}

void int4_block_decode(const uint8_t *wire, int64_t n, float *out, float factor, int32_t adds,
                       int64_t first, int64_t last) {
    int64_t blocks = ceil_div(n, 256);
    for (int64_t b = first; b < last; b++) {
        float scale = get(wire + 4 * b);
        const uint8_t *q = wire + 4 * blocks + 128 * b;
        int64_t m = std::min<int64_t>(256, n - 256 * b), half = (m + 1) / 2;
        emit(out + 256 * b, half, factor, adds,
             [=](int64_t i) { return (float)((int32_t)(q[i] & 15) - 8) * scale; });
        emit(out + 256 * b + half, m - half, factor, adds,
             [=](int64_t i) { return (float)((int32_t)(q[i] >> 4) - 8) * scale; });
    }
    if (!adds) end_stream();
}

constexpr int64_t BOOK_BLOCK = 65536;

int64_t int8_codebook_encode(const float *x, int64_t n, uint8_t *wire, int64_t first, int64_t last) {
    int64_t blocks = ceil_div(n, BOOK_BLOCK);
    for (int64_t b = first; b < last; b++) {
        const float *from = x + BOOK_BLOCK * b;
        int64_t m = std::min<int64_t>(BOOK_BLOCK, n - BOOK_BLOCK * b);
        uint8_t *q = wire + 1024 * blocks + BOOK_BLOCK * b;
        uint32_t most = largest(from, m);
        if (most > LARGEST_BITS) return BOOK_BLOCK * b + refused(from, m);
        float absmax = from_bits(most);
        if (absmax < SMALLEST) {
            std::memset(wire + 1024 * b, 0, 1024);
            std::memset(q, 128, (size_t)m);
            continue;
        }
        float to_units = UNITS / absmax;
        int64_t squares = 0;
        for (int64_t i = 0; i < m; i++) {
            int64_t u = (int32_t)__builtin_rintf(from[i] * to_units);
            squares += u * u;
        }
        double unit = (double)absmax * 0x1p-20;
        double sigma = unit * std::sqrt((double)squares / (double)std::max<int64_t>(m - 1, 1));
        float inverse = (float)(1.0 / (12.0 / 256.0 * sigma));
        for (int64_t i = 0; i < m; i++) {
            float t = __builtin_rintf(from[i] * inverse);
            t = t < -128.0f ? -128.0f : t;
            t = t > 127.0f ? 127.0f : t;
            q[i] = (uint8_t)((int32_t)t + 128);
        }
        // An entry has the count of values in bits 40 to 63, and their sum of u + 2^20 below.
        // Successive values use four tables, because additions to one entry wait for each other.
        static thread_local uint64_t table[4][256];
        std::memset(table, 0, sizeof table);
        auto count = [&](int64_t i) {
            int64_t u = (int32_t)__builtin_rintf(from[i] * to_units);
            table[i & 3][q[i]] += (uint64_t)1 << 40 | (uint64_t)(u + (1 << 20));
        };
        for (int64_t i = 0; i < m; i++) count(i);
        for (int code = 0; code < 256; code++) {
            uint64_t entry = table[0][code] + table[1][code] + table[2][code] + table[3][code];
            int64_t num = (int64_t)(entry >> 40);
            int64_t sum = (int64_t)(entry & (((uint64_t)1 << 40) - 1)) - num * (1 << 20);
            double mean = (double)sum / (double)std::max<int64_t>(num, 1);
            put(wire + 1024 * b + 4 * code, (float)(mean * unit));
        }
    }
    return -1;
}

void int8_codebook_decode(const uint8_t *wire, int64_t n, float *out, float factor, int32_t adds,
                          int64_t first, int64_t last) {
    int64_t blocks = ceil_div(n, BOOK_BLOCK);
    for (int64_t b = first; b < last; b++) {
        float book[256];
        std::memcpy(book, wire + 1024 * b, 1024);
        const uint8_t *q = wire + 1024 * blocks + BOOK_BLOCK * b;
        emit(out + BOOK_BLOCK * b, std::min<int64_t>(BOOK_BLOCK, n - BOOK_BLOCK * b), factor, adds,
             [&](int64_t i) { return book[q[i]]; });
    }
    if (!adds) end_stream();
}

int64_t top_k_2bit_encode(const float *x, int64_t n, uint8_t *wire, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const float *from = x + TOP_BLOCK * b;
        int64_t m = std::min<int64_t>(TOP_BLOCK, n - TOP_BLOCK * b);
        uint32_t most = largest(from, m);
        if (most > LARGEST_BITS) return TOP_BLOCK * b + refused(from, m);
        top_k_pack(from, m, ceil_div(m, 64), from_bits(most), wire + 120 * b);
    }
    return -1;
}

void top_k_2bit_decode(const uint8_t *wire, int64_t n, float *out, float factor, int32_t adds,
                       int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const uint8_t *record = wire + 120 * b;
        int64_t m = std::min<int64_t>(TOP_BLOCK, n - TOP_BLOCK * b), k = ceil_div(m, 64);
        float levels[2] = {get(record), get(record + 4)};
        float *to = out + TOP_BLOCK * b;
        if (!adds) std::memset(to, 0, sizeof(float) * (size_t)m);
        for (int64_t i = 0; i < k; i++) {
            uint32_t code = read_bits(record + 8, 2 * i, 2);
            int64_t place = read_bits(record + 8 + ceil_div(k, 4), 12 * i, 12);
            if (place >= m) continue; // a damaged record
            float value = code & 2 ? -levels[code & 1] : levels[code & 1];
            to[place] = adds ? to[place] + (factor == 1.0f ? value : value * factor) : value;
        }
    }
}

} // extern "C"

namespace {

using Encode = decltype(int8_block_encode);
using Decode = decltype(int8_block_decode);

// Encode share · x + the values of `added`, a block at a time, so that sums stay in the caches.
template <int64_t BLOCK, Encode encode, Decode decode>
int64_t encode_sum(const float *x, int64_t n, float share, const uint8_t *added, uint8_t *wire,
                   int64_t first, int64_t last) {
    alignas(64) static thread_local float block[BLOCK];
    for (int64_t b = first; b < last; b++) {
        int64_t m = std::min<int64_t>(BLOCK, n - BLOCK * b);
        const float *from = x + BLOCK * b;
        for (int64_t i = 0; i < m; i++) block[i] = share == 0.0f ? 0.0f : from[i] * share;
        float *at = block - BLOCK * b; // both functions count from the first block
        if (added) decode(added, n, at, 1.0f, 1, b, b + 1);
        int64_t bad = encode(at, n, wire, b, b + 1);
        if (bad >= 0) return bad;
    }
    return -1;
}

} // namespace

extern "C" {

#define ENCODE_SUM(kind, BLOCK)                                                                    \
    int64_t kind##_encode_sum(const float *x, int64_t n, float share, const uint8_t *added,       \
                              uint8_t *wire, int64_t first, int64_t last) {                       \
        return encode_sum<BLOCK, kind##_encode, kind##_decode>(x, n, share, added, wire, first,   \
                                                               last);                             \
    }

ENCODE_SUM(int8_block, 256)
ENCODE_SUM(int4_block, 256)
ENCODE_SUM(int8_codebook, BOOK_BLOCK)
ENCODE_SUM(top_k_2bit, TOP_BLOCK)

} // extern "C"

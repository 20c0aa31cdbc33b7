// Weights as an update reads and writes them: float32, or 16-bit parameters and what is kept beside each; see masters.py.
#pragma once
#include "states.h"

constexpr int64_t kRemainder = 3, kKey = 4, kRemainder8 = 5;  // in `native.DTYPE_CODES`: int16, int64 and int8
constexpr int64_t kWide = 4;                 // `native.WIDE`, added to the type of a copy that is held as float32
constexpr int64_t kSpan = kBlock;            // parameters of a checksum; `SPAN` in Python

// A row of the table: beside a float32 parameter its rounded copy, if any; beside a 16-bit one its remainder with
// checksums, its float32 master, or the key of its random bits.
struct Weight { int64_t param, dtype, beside, beside_dtype, checksums; };

struct Factors {
  uint32_t of[kSpan]{};
  constexpr Factors() {
    for (uint32_t i = 0; i < kSpan; ++i) {
      const uint32_t mixed = i * 0x9E3779B1u;
      of[i] = (mixed ^ mixed >> 15) * 0x85EBCA6Bu | 1;
    }
  }
};
constexpr Factors kFactors;

inline uint32_t checksum(const uint16_t* param, int64_t n) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += param[i] * kFactors.of[i];
  return sum;
}

// Philox 4x32-10: 32 random bits for each element of a block, four from each counter. The counters take every round
// together, so that the compiler makes vectors of them.
inline void random_words(const int64_t* key, int64_t begin, uint32_t* words) {
  constexpr int64_t kCounters = kBlock / 4;
  uint32_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
  for (int64_t i = 0; i < kCounters; ++i) {
    const uint64_t group = uint64_t(begin / 4 + i);
    c0[i] = uint32_t(group), c1[i] = uint32_t(group >> 32), c2[i] = uint32_t(key[2]), c3[i] = uint32_t(key[1]);
  }
  uint32_t k0 = uint32_t(key[0]), k1 = uint32_t(uint64_t(key[0]) >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int64_t i = 0; i < kCounters; ++i) {
      const uint64_t a = uint64_t(0xD2511F53u) * c0[i], b = uint64_t(0xCD9E8D57u) * c2[i];
      c0[i] = uint32_t(b >> 32) ^ c1[i] ^ k0, c1[i] = uint32_t(b);
      c2[i] = uint32_t(a >> 32) ^ c3[i] ^ k1, c3[i] = uint32_t(a);
    }
  for (int64_t i = 0; i < kCounters; ++i)
    words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
}

// A master counts where it rounds to the parameter; elsewhere the parameter was written since.
template <typename Low> void follow_parameter(const Low* param, float* master, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Low rounded;
    narrow(master[i], rounded);
    master[i] = widen(rounded) == widen(param[i]) ? master[i] : widen(param[i]);
  }
}

template <typename Low> void join(const uint16_t* param, const Low* remainder, uint32_t known, int64_t n, float* to) {
  fetch_ahead(remainder);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t low = uint32_t(remainder[i]) << (16 - 8 * sizeof(Low)) & known;
    to[i] = bits<float>((param[i] - (low >> 15)) << 16 | low);
  }
}

inline uint32_t bits_of_weight(float weight) {  // a carry into the sign would make a zero of some NaN
  const uint32_t wide = bits<uint32_t>(weight);
  return (wide & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : wide;
}

// `words`: random bits, by which a master of 24 bits is rounded.
template <typename Low>
void split(const float* weights, const uint32_t* words, int64_t n, uint16_t* param, Low* remainder) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t wide = bits_of_weight(weights[i]);
    if (sizeof(Low) == 1) wide += (wide & 0x7fffffff) < 0x7f7fff00 ? words[i] & 0xff : 0;
    param[i] = uint16_t((wide + 0x8000) >> 16);
    remainder[i] = Low(wide >> (16 - 8 * sizeof(Low)));
  }
}

// The float32 weights of at most a block, the `span`-th: in `block`, or the master itself.
inline float* read_weights(const Weight& w, int64_t begin, int64_t span, int64_t n, float* block) {
  if (w.dtype == 0) {
    fetch_ahead(pointer<float>(w.param, begin));
    if (w.beside_dtype > kWide) fetch_ahead(pointer<float>(w.beside, begin));
    else if (w.beside) fetch_ahead(pointer<uint16_t>(w.beside, begin));
    return pointer<float>(w.param, begin);
  }
  const uint16_t* param = pointer<uint16_t>(w.param, begin);
  fetch_ahead(param);
  if (w.beside_dtype == 0) {
    float* master = pointer<float>(w.beside, begin);
    fetch_ahead(master);
    if (w.dtype == 1) follow_parameter(pointer<Half>(w.param, begin), master, n);
    else follow_parameter(pointer<BFloat16>(w.param, begin), master, n);
    return master;
  }
  if (w.beside_dtype == kKey) {
    for (int64_t i = 0; i < n; ++i) block[i] = bits<float>(uint32_t(param[i]) << 16);
    return block;
  }
  const uint32_t known = *pointer<uint32_t>(w.checksums, span) == checksum(param, n) ? 0xffff : 0;
  if (w.beside_dtype == kRemainder) join(param, pointer<uint16_t>(w.beside, begin), known, n, block);
  else join(param, pointer<uint8_t>(w.beside, begin), known, n, block);
  return block;
}

template <typename Low> void round_to(const float* from, int64_t n, Low* to) {
  for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]);
}

template <typename Low> void round_in_float32(const float* __restrict from, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    Low rounded;
    narrow(from[i], rounded);
    to[i] = widen(rounded);
  }
}

// Writes the parameters, and beside them what `weights`, as `read_weights` returned them, doesn't hold yet. `words`: see
// `split`.
inline void write_weights(const Weight& w, int64_t begin, int64_t span, int64_t n, const float* weights,
                          const uint32_t* words) {
  if (w.dtype == 0 && w.beside_dtype > kWide) {
    with_dtype(w.beside_dtype - kWide, [&](auto type) {
      round_in_float32<decltype(type)>(weights, n, pointer<float>(w.beside, begin));
    });
    return;
  }
  if (w.beside_dtype < kRemainder) {
    const int64_t dtype = w.dtype == 0 ? w.beside_dtype : w.dtype, low = w.dtype == 0 ? w.beside : w.param;
    if (low) with_dtype(dtype, [&](auto type) { round_to(weights, n, pointer<decltype(type)>(low, begin)); });
    return;
  }
  uint16_t* param = pointer<uint16_t>(w.param, begin);
  if (w.beside_dtype == kKey) {
    uint32_t keyed[kBlock];
    random_words(pointer<int64_t>(w.beside, 0), span * kSpan, keyed);
    for (int64_t i = 0; i < n; ++i) param[i] = uint16_t((bits_of_weight(weights[i]) + (keyed[i] & 0xffff)) >> 16);
    return;
  }
  if (w.beside_dtype == kRemainder) split(weights, words, n, param, pointer<uint16_t>(w.beside, begin));
  else split(weights, words, n, param, pointer<uint8_t>(w.beside, begin));
  *pointer<uint32_t>(w.checksums, span) = checksum(param, n);
}

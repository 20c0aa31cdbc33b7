// Optimizer states in 16 or 8 bits, as an update reads and writes them; see states.py.
#pragma once
#include "chunks.h"

constexpr int64_t kCoded = 5;       // in `native.DTYPE_CODES`: int8
constexpr int64_t kCodeBlock = 64;  // numbers of one scale; `CODES` in Python

// How a tensor's states are kept: 32, 16 or 8 bits. `row`: numbers behind the first dimension, 0 but for 8 bits, whose
// rows are counted as if filled up to whole spans: so a span, and a block of codes, lies in one row.
struct Coding { int64_t dtype, scales, row, first, key; };

struct Rows8 {
  int64_t row, padded, numel;
  Rows8(int64_t row, int64_t numel)
      : row(row), padded((row + kBlock - 1) / kBlock * kBlock), numel(row ? numel / row * padded : numel) {}
  int64_t offset(int64_t begin) const { return row ? begin / padded * row + begin % padded : begin; }
  int64_t count(int64_t begin) const { return std::min(kBlock, row ? row - begin % padded : numel - begin); }
};

inline uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// What decides the rounding of a tensor's states in one step.
struct Rounding {
  uint32_t begin, middle;
  bool first_at_random;

  Rounding(int64_t key, float step, double beta)
      : begin(mixed(uint32_t(key) + mixed(uint32_t(step)))), middle(mixed(uint32_t(uint64_t(key) >> 32) ^ begin)),
        first_at_random(beta > 0.99) {}

  // 32 random bits for each of at most a block of elements, from a place in the whole parameter on.
  void words(uint64_t place, int64_t n, uint32_t* to) const {
    const uint32_t low = uint32_t(place), high = uint32_t(place >> 32) * 0x9E3779B1u + begin, next = high + 0x9E3779B1u;
    for (uint32_t i = 0; i < uint32_t(n); ++i) {
      const uint32_t at = low + i;
      uint32_t x = at + (at < low ? next : high);
      x = (x ^ x >> 16) * 0x7FEB352Du;
      x = (x ^ x >> 15 ^ middle) * 0x846CA68Bu;
      to[i] = x ^ x >> 16;
    }
  }
  uint32_t second_word(uint32_t word) const {  // of an element
    const uint32_t x = word * 0x9E3779B1u + middle;
    const uint32_t y = (x ^ x >> 15) * 0x85EBCA6Bu;
    return y ^ y >> 13;
  }
};

// Up with the chance that makes it right on average or, where `random` is a half, to nearest.
inline float round_up_or_down(float x, float random) {
  const float below = float(int32_t(x));
  return below + (random < x - below ? 1.f : 0.f);
}
inline float unit(uint32_t word) { return float(int32_t(word >> 8)) * 0x1p-24f; }

inline float largest_finite(const float* x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = bits<int32_t>(x[i]) & 0x7fffffff, finite = magnitude < 0x7f800000 ? magnitude : 0;
    largest = finite > largest ? finite : largest;
  }
  return bits<float>(largest);
}

// Calls `body` with the length of a block of codes, as a constant if it is whole: so the compiler unrolls loops.
template <typename Body> void with_length(int64_t n, Body body) {
  if (n == kCodeBlock) body(std::integral_constant<int64_t, kCodeBlock>{});
  else body(n);
}

inline void decode_first(const int8_t* __restrict codes, float scale, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    const float code = codes[i];
    to[i] = code / (254 - std::fabs(code)) * scale;
  }
}

inline float part_of_255(float code) {
#ifdef FP_FAST_FMAF
  constexpr float kNear = 1.f / 255, kRest = float(1. / 255 - kNear);
  return std::fma(code, kNear, code * kRest);  // as a division rounds it, for each of the 256 codes
#else
  return code / 255;
#endif
}

inline void decode_second(const uint8_t* __restrict codes, float scale, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    const float root = part_of_255(codes[i]) * scale;
    to[i] = root * root;
  }
}

inline void encode_first(const float* __restrict x, const float* __restrict random, float scale, int64_t n,
                         uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) {
    float ratio = std::fabs(x[i]) / scale;
    ratio = ratio <= 1 ? ratio : 1.f;
    const float code = round_up_or_down(254 * ratio / (1 + ratio), random[i]);
    codes[i] = uint8_t(int32_t(x[i] < 0 ? -code : code));
  }
}

inline void encode_second(const float* __restrict roots, const float* __restrict random, float scale, int64_t n,
                          uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) {
    float ratio = roots[i] / scale;
    ratio = ratio <= 1 ? ratio : 1.f;
    const float code = round_up_or_down(255 * ratio, random[i]), least = roots[i] > 0 ? 1.f : 0.f;
    codes[i] = uint8_t(int32_t(code > least ? code : least));
  }
}

// The same of a whole block with half of the divisions, the first moment to nearest. False where it isn't sure: if a
// number isn't finite, or so near to the next code that the roundings before, less than 7e-5 in all, might count.
template <bool squares>
bool encode_if_sure(const float* __restrict x, const uint32_t* __restrict words, float scale,
                    uint8_t* __restrict codes) {
  constexpr float kInteger = 0x1.8p23f;  // numbers that are added to it end as integers
  const float factor = 255 / scale;
  int32_t apart = 0;  // as bits, whose order is that of numbers, and NaN the largest
  for (int64_t i = 0; i < kCodeBlock; ++i) {
    const float drawn = squares ? multiply_add(float(int32_t(words[i] >> 8)), -0x1p-24f, 0.5f) : 0;
    const float exact = squares ? multiply_add(x[i], factor, drawn) : 254 * x[i] / (scale + std::fabs(x[i]));
    const float sum = exact + kInteger;
    const int32_t distance = bits<int32_t>(std::fabs(sum - kInteger - exact));
    apart = distance > apart ? distance : apart;
    const float least = x[i] > 0 ? kInteger + 1 : kInteger;
    codes[i] = uint8_t(bits<uint32_t>(squares && sum < least ? least : sum));
  }
  return apart < bits<int32_t>(0.5f - 7e-5f);
}

// `x`: first moments, or roots of squares. `words`: random bits; null where a first moment is coded to nearest. Returns
// the scale.
template <bool squares> float encode(const float* x, const uint32_t* words, int64_t n, uint8_t* codes) {
  const float scale = n == kCodeBlock ? largest_finite(x, kCodeBlock) : largest_finite(x, n);
  if (scale < (squares ? 0x1p-55f : 0x1p-117f)) {
    std::memset(codes, 0, n);
    return 0;
  }
  if (n == kCodeBlock && (squares || !words) && encode_if_sure<squares>(x, words, scale, codes)) return scale;
  float random[kCodeBlock];
  for (int64_t i = 0; i < n; ++i) random[i] = words ? unit(words[i]) : 0.5f;
  if (squares) encode_second(x, random, scale, n, codes);
  else encode_first(x, random, scale, n, codes);
  return scale;
}

// A bfloat16 next to a number, by 16 random bits, which never make infinity of it.
inline BFloat16 round_at_random(float x, uint32_t word) {
  BFloat16 nearest;
  narrow(x, nearest);
  const uint32_t wide = bits<uint32_t>(x), magnitude = wide & 0x7fffffff;
  const uint32_t rounded = std::min((magnitude + (word >> 16)) >> 16, 0x7f7fu) | (wide >> 31 << 15);
  return {uint16_t(magnitude >= 0x7f800000 ? nearest.raw : rounded)};
}

// The float32 states of a span: `moments` many, the second, if any, squares. `span`: its number.
inline void decode_states(const Coding& c, const int64_t* states, int moments, int64_t span, int64_t offset, int64_t n,
                          float (*to)[kBlock]) {
  for (int moment = 0; moment < moments; ++moment) {
    if (c.dtype != kCoded) {
      const BFloat16* from = pointer<BFloat16>(states[moment], offset);
      fetch_ahead(from);
      for (int64_t i = 0; i < n; ++i) to[moment][i] = widen(from[i]);
      continue;
    }
    const uint8_t* codes = pointer<uint8_t>(states[moment], offset);
    fetch_ahead(codes);
    const float* scales = pointer<float>(c.scales, 2 * span * moments + moment);
    for (int64_t begin = 0; begin < n; begin += kCodeBlock, scales += moments)
      with_length(std::min(kCodeBlock, n - begin), [&](auto length) {
        if (moment == 0) decode_first(reinterpret_cast<const int8_t*>(codes + begin), *scales, length, to[0] + begin);
        else decode_second(codes + begin, *scales, length, to[1] + begin);
      });
  }
}

// `words`: random bits of each element. Their lowest byte isn't read. `from`: the moments, then the second's roots.
inline void encode_states(const Coding& c, const Rounding& rounding, const uint32_t* words, const int64_t* states,
                          int moments, int64_t span, int64_t offset, int64_t n, const float (*from)[kBlock]) {
  uint32_t seconds[kBlock];
  for (int64_t i = 0; i < n && rounding.first_at_random; ++i) seconds[i] = rounding.second_word(words[i]);
  for (int moment = 0; moment < moments; ++moment) {
    const bool at_random = moment || rounding.first_at_random;
    const uint32_t* drawn = moment ? words : seconds;
    if (c.dtype != kCoded) {
      BFloat16* to = pointer<BFloat16>(states[moment], offset);
      if (at_random)
        for (int64_t i = 0; i < n; ++i) to[i] = round_at_random(from[moment][i], drawn[i]);
      else
        for (int64_t i = 0; i < n; ++i) narrow(from[0][i], to[i]);
      continue;
    }
    uint8_t* codes = pointer<uint8_t>(states[moment], offset);
    float* scales = pointer<float>(c.scales, 2 * span * moments + moment);
    for (int64_t begin = 0; begin < n; begin += kCodeBlock, scales += moments) {
      const auto code = moment ? encode<true> : encode<false>;
      *scales = code(from[2 * moment] + begin, at_random ? drawn + begin : nullptr, std::min(kCodeBlock, n - begin),
                     codes + begin);
    }
  }
}

// Lists of tensors as tables of addresses, streamed in chunks by all threads; and 16-bit floats, rounded as torch does.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int64_t kChunk = 16384;   // elements a thread takes at a time
constexpr int64_t kBlock = 128;     // elements that stay in the L1 cache between two uses
constexpr int64_t kAhead = 2048;    // bytes between those in use and those that are fetched
constexpr int64_t kSerial = 65536;  // fewer elements of a step don't repay waking other threads

template <typename To, typename From> inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Half { uint16_t raw; };
struct BFloat16 { uint16_t raw; };

// a * b + c. Rounded once where torch's kernels round once, so that results have the bits of its foreach and for-loop
// optimizers; native.py keeps the compiler from choosing.
inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) { return bits<float>(uint32_t(x.raw) << 16); }

inline float widen(Half x) {
  // The product rebiases the exponent, subnormals included; infinity and NaN need theirs set.
  const float rebiased = bits<float>(uint32_t(x.raw & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (x.raw & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return bits<float>(bits<uint32_t>(rebiased) | special | uint32_t(x.raw & 0x8000) << 16);
}

inline void narrow(float x, float& to) { to = x; }

inline void narrow(float x, BFloat16& to) {
  const uint32_t wide = bits<uint32_t>(x);
  const uint32_t nearest_even = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  to.raw = uint16_t((wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest_even);
}

inline void narrow(float x, Half& to) {
  const uint32_t wide = bits<uint32_t>(x), magnitude = wide & 0x7fffffff;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t subnormal = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - bits<uint32_t>(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  to.raw = uint16_t((magnitude >= (143u << 23) ? special : finite) | ((wide >> 16) & 0x8000));
}

// Calls `body` with a value of the type that `dtype` names (see `native.DTYPE_CODES`).
template <typename Body> void with_dtype(int64_t dtype, Body body) {
  if (dtype == 0) body(float{});
  else if (dtype == 1) body(Half{});
  else body(BFloat16{});
}

template <typename T> inline T* pointer(int64_t address, int64_t offset) {
  return reinterpret_cast<T*>(address) + offset;
}

// Asks for what follows a block of a tensor. The processor's own prefetcher begins late and stops at the end of a page;
// without it, as many lines are on their way as the queue of instructions holds.
template <typename T> inline void fetch_ahead(const T* block) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(block) + kAhead;
  for (size_t line = 0; line < kBlock * sizeof(T); line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(begin + line));
}

struct Chunk { int64_t tensor, begin, end; };

inline std::vector<Chunk> chunks_of(int64_t tensors, const int64_t* numel) {
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < tensors; ++t)
    for (int64_t begin = 0; begin < numel[t]; begin += kChunk)
      chunks.push_back({t, begin, std::min(begin + kChunk, numel[t])});
  return chunks;
}

template <typename Body>
void for_each_chunk(const std::vector<Chunk>& chunks, int threads, Body body, int64_t serial = kSerial) {
  const int64_t n = int64_t(chunks.size());
  int64_t elements = 0;
  for (const Chunk& c : chunks) elements += c.end - c.begin;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (elements >= serial)
  for (int64_t i = 0; i < n; ++i) body(chunks[i], i);
}

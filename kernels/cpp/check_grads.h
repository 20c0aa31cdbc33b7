// Reading gradients: are all of them finite, what is their norm, and are they those of before?
#pragma once
#include <cmath>

#include "chunks.h"

struct GradTable { const int64_t *numel, *addresses, *dtypes; };  // see `tables.GradTable`

struct Sums {
  double squares = 0;  // finite exactly when every product is, since the square of a float never overflows a double
  double digest = 0;   // a sum with weights, which tells most gradients of equal norm apart
};

// Sums over grad * multiplier of all gradients. Chunks are added in order, so they don't depend on the threads.
inline Sums sums_of(int64_t tensors, const GradTable& grads, float multiplier, int threads) {
  const auto chunks = chunks_of(tensors, grads.numel);
  std::vector<Sums> sums(chunks.size());
  for_each_chunk(chunks, threads, [&](const Chunk& c, int64_t i) {
    with_dtype(grads.dtypes[c.tensor], [&](auto type) {
      const auto* g = pointer<decltype(type)>(grads.addresses[c.tensor], c.begin);
      const int64_t n = c.end - c.begin;
      double squares[32] = {};
      float plain[32] = {};
      const auto add = [&](int64_t k, int64_t lane) {
        const float product = widen(g[k + lane]) * multiplier;
        squares[lane] += double(product) * product;
        plain[lane] += product;
      };
      int64_t k = 0;
      for (; k + 32 <= n; k += 32) {
        if (k % kBlock == 0) fetch_ahead(g + k);
        for (int64_t lane = 0; lane < 32; ++lane) add(k, lane);
      }
      for (int64_t lane = 0; k + lane < n; ++lane) add(k, lane);
      for (int lane = 0; lane < 32; ++lane) {
        sums[i].squares += squares[lane];
        sums[i].digest += (lane + 1) * double(plain[lane]);
      }
    });
  });
  Sums all;
  for (size_t i = 0; i < sums.size(); ++i) {
    all.squares += sums[i].squares;
    all.digest += double(i + 1) * sums[i].digest;
  }
  return all;
}

// Multiplies every gradient in place, unless the multiplier is one: then the bits stay, NaN payloads included.
// Returns whether a gradient was, or became, infinite or NaN.
inline bool scale_in_place(int64_t tensors, const GradTable& grads, float multiplier, int threads) {
  const auto chunks = chunks_of(tensors, grads.numel);
  std::vector<char> bad(chunks.size());
  for_each_chunk(chunks, threads, [&](const Chunk& c, int64_t i) {
    with_dtype(grads.dtypes[c.tensor], [&](auto type) {
      auto* g = pointer<decltype(type)>(grads.addresses[c.tensor], c.begin);
      const int64_t n = c.end - c.begin;
      uint32_t largest = 0;  // magnitudes order like their bits, infinity and NaN last
      const auto look = [&](float x) { largest = std::max(largest, bits<uint32_t>(x) & 0x7fffffff); };
      if (multiplier == 1)
        for (int64_t k = 0; k < n; ++k) look(widen(g[k]));
      else
        for (int64_t k = 0; k < n; ++k) {
          auto product = g[k];
          narrow(widen(product) * multiplier, product);
          g[k] = product;
          look(widen(product));
        }
      bad[i] = largest >= 0x7f800000;
    });
  });
  return std::any_of(bad.begin(), bad.end(), [](char b) { return b != 0; });
}

// Copies of weights: casts, and samples of memory. A library of its own, which is built in half a second.
#include "chunks.h"

// Calls `body(from, to, n, type)` for each chunk of each weight, float32, with the address of its copy's chunk and a
// number of the type to round to; copies have `size` bytes an element.
template <typename Body> void for_each_weight(int64_t tensors, const int64_t* numel, const int64_t* weights,
                                              const int64_t* copies, const int64_t* dtypes, int64_t size, int64_t threads,
                                              Body body) {
  for_each_chunk(chunks_of(tensors, numel), int(threads), [&](const Chunk& c, int64_t) {
    const float* from = at<float>(weights[c.tensor], c.begin);
    const int64_t to = copies[c.tensor] + c.begin * size;
    with_dtype(dtypes[c.tensor], [&](auto type) { body(from, to, c.end - c.begin, type); });
  });
}

extern "C" {

// See `cast_many.cast_many_`.
void cast_many(int64_t tensors, const int64_t* numel, const int64_t* weights, const int64_t* copies,
               const int64_t* dtypes, int64_t threads) {
  for_each_weight(tensors, numel, weights, copies, dtypes, 2, threads,
                  [](const float* from, int64_t address, int64_t n, auto type) {
    auto* to = at<decltype(type)>(address, 0);
    for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]);
  });
}

// See `round_many.round_many_`.
void round_many(int64_t tensors, const int64_t* numel, const int64_t* weights, const int64_t* copies,
                const int64_t* dtypes, int64_t threads) {
  for_each_weight(tensors, numel, weights, copies, dtypes, 4, threads,
                  [](const float* from, int64_t address, int64_t n, auto value) {
    float* to = at<float>(address, 0);
    for (int64_t i = 0; i < n; ++i) {
      narrow(from[i], value);
      to[i] = widen(value);
    }
  });
}

// Copies the 64 bytes at each of `runs` addresses, then the 4 bytes at each of `words` addresses, to `out`.
void read_words(int64_t runs, const int64_t* run, int64_t words, const int64_t* word, char* out) {
  for (int64_t i = 0; i < runs; ++i, out += 64) std::memcpy(out, at<char>(run[i], 0), 64);
  for (int64_t i = 0; i < words; ++i, out += 4) std::memcpy(out, at<char>(word[i], 0), 4);
}
}

// Weights and their copies: what state they are in, samples of their memory, casts. Reads torch's objects by its headers.
#include <c10/core/TensorImpl.h>

#include <exception>

#include "chunks.h"

extern "C" void* PyEval_SaveThread();
extern "C" void PyEval_RestoreThread(void*);

namespace {
// See `unchanged.Unchanged`. Each array is given by its length and its address.
struct State {
  int64_t tensors;
  c10::TensorImpl* const* tensor;  // that must be alive
  int64_t counters;
  c10::TensorImpl* const* counter;
  const int64_t* version;
  int64_t weights;
  c10::TensorImpl* const* weight;
  const int64_t* address;
  int64_t storages;
  c10::StorageImpl* const* storage;
  const int64_t* users;
  int64_t runs;
  const char* const* run;
  int64_t words;
  const char* const* word;
  const char* sampled;
};

int64_t address_of(const c10::TensorImpl& tensor) {
  if (tensor.numel() == 0) return 0;
  if (!tensor.unsafe_storage()) return -1;  // it was let go, see `storages.discard_memory`
  const auto begin = reinterpret_cast<int64_t>(tensor.unsafe_storage().data());
  return begin + tensor.storage_offset() * int64_t(tensor.itemsize());
}

// Does all live, at the noted addresses, and held by as many as noted?
bool is_in_place(const State& state) {
  for (int64_t i = 0; i < state.tensors; ++i)
    if (c10::raw::intrusive_ptr::use_count(state.tensor[i]) == 0) return false;
  for (int64_t i = 0; i < state.weights; ++i)
    if (address_of(*state.weight[i]) != state.address[i]) return false;
  for (int64_t i = 0; i < state.storages; ++i)
    if (c10::raw::intrusive_ptr::use_count(state.storage[i]) != state.users[i]) return false;
  for (int64_t i = 0; i < state.counters; ++i)
    if (state.counter[i]->is_inference()) return false;
  return true;
}

bool is_unwritten(const State& state) {
  for (int64_t i = 0; i < state.counters; ++i)
    if (state.counter[i]->version_counter().current_version() != state.version[i]) return false;
  const char* sampled = state.sampled;
  for (int64_t i = 0; i < state.runs; ++i, sampled += 64)
    if (std::memcmp(state.run[i], sampled, 64)) return false;
  for (int64_t i = 0; i < state.words; ++i, sampled += 4)
    if (std::memcmp(state.word[i], sampled, 4)) return false;
  return true;
}

void read(const State& state, int64_t* versions, char* sampled) {
  for (int64_t i = 0; i < state.counters; ++i) versions[i] = state.counter[i]->version_counter().current_version();
  for (int64_t i = 0; i < state.runs; ++i, sampled += 64) std::memcpy(sampled, state.run[i], 64);
  for (int64_t i = 0; i < state.words; ++i, sampled += 4) std::memcpy(sampled, state.word[i], 4);
}

// See `cast_table.CastTable`: float32 weights, and copies of `size` bytes an element.
struct Table {
  int64_t tensors;
  c10::TensorImpl* const* weight;
  const int64_t *from, *to, *numel, *dtype, *size;
  const char* chosen;
};

void cast_chunk(const Table& table, const Chunk& c) {
  const float* from = pointer<float>(table.from[c.tensor], c.begin);
  const int64_t n = c.end - c.begin;
  with_dtype(table.dtype[c.tensor], [&](auto value) {
    if (table.size[c.tensor] == 2) {
      auto* to = pointer<decltype(value)>(table.to[c.tensor], c.begin);
      for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]);
    } else {
      float* to = pointer<float>(table.to[c.tensor], c.begin);
      for (int64_t i = 0; i < n; ++i) {
        narrow(from[i], value);
        to[i] = widen(value);
      }
    }
  });
}

// Called with Python's lock, which it lets go while it casts; the weights' memory stays until it has done.
bool cast(const Table& table, int threads) {
  std::vector<c10::Storage> held;
  std::vector<Chunk> chunks = chunks_of(table.tensors, table.numel);
  std::erase_if(chunks, [&](const Chunk& c) { return !table.chosen[c.tensor]; });
  for (int64_t i = 0; i < table.tensors; ++i) {
    if (!table.chosen[i]) continue;
    const c10::TensorImpl* weight = table.weight[i];
    if (c10::raw::intrusive_ptr::use_count(table.weight[i]) == 0 || address_of(*weight) != table.from[i])
      return false;  // another thread has given it other memory
    held.push_back(weight->unsafe_storage());
  }
  void* const thread = PyEval_SaveThread();
  for_each_chunk(chunks, threads, [&](const Chunk& c, int64_t) { cast_chunk(table, c); });
  PyEval_RestoreThread(thread);
  return true;
}

template <typename Act> int64_t succeeds(Act act) {
  try {
    return act();
  } catch (const std::exception&) {  // memory that a tensor doesn't give out any more
    return 0;
  }
}
}  // namespace

extern "C" {

int64_t unchanged(const State* state) {
  return succeeds([&] { return is_in_place(*state) && is_unwritten(*state); });
}

// Writes what versions and sample are now, unless more than these may have changed: then it returns 0.
int64_t read_state(const State* state, int64_t* versions, char* sampled) {
  return succeeds([&] {
    if (!is_in_place(*state)) return false;
    read(*state, versions, sampled);  // versions first: a write that comes meanwhile is found in the next call
    return true;
  });
}

// Casts the chosen weights; 0 if one isn't where the table says, and nothing was cast.
int64_t cast_chosen(const Table* table, int64_t threads) {
  return succeeds([&] { return cast(*table, int(threads)); });
}

// Copies the 64 bytes at each of `runs` addresses, then the 4 bytes at each of `words` addresses, to `out`.
int64_t read_words(int64_t runs, const int64_t* run, int64_t words, const int64_t* word, char* out) {
  for (int64_t i = 0; i < runs; ++i, out += 64) std::memcpy(out, pointer<char>(run[i], 0), 64);
  for (int64_t i = 0; i < words; ++i, out += 4) std::memcpy(out, pointer<char>(word[i], 0), 4);
  return 1;
}
}

// Weights and their copies: what state they are in, samples of their memory, casts. Reads torch's objects by its headers.
#include <c10/core/TensorImpl.h>

#include <exception>
#include <memory>

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
  int64_t* version;
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
  char* sampled;
};

int64_t address_of(const c10::TensorImpl& tensor) {
  if (tensor.numel() == 0) return 0;
  if (!tensor.unsafe_storage()) return -1;  // it was let go, see `storages.discard_memory`
  const auto begin = reinterpret_cast<int64_t>(tensor.unsafe_storage().data());
  return begin + tensor.storage_offset() * int64_t(tensor.itemsize());
}

// Are all tensors alive, the weights at the noted addresses, and the storages held by as many users as noted?
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

// Copies what versions and sample are now.
void read(const State& state, int64_t* version, char* sampled) {
  for (int64_t i = 0; i < state.counters; ++i) version[i] = state.counter[i]->version_counter().current_version();
  // after the versions: a write that comes meanwhile is found in the next call
  for (int64_t i = 0; i < state.runs; ++i, sampled += 64) std::memcpy(sampled, state.run[i], 64);
  for (int64_t i = 0; i < state.words; ++i, sampled += 4) std::memcpy(sampled, state.word[i], 4);
}

// The first fields of objects in Python: see `SharerRecord`, `MemoryRecord` and `CopyRecord` in `renewal`.
struct Sharer {
  int64_t seen;
};
struct Memory {
  int64_t mark, doubt, roster, step_open;
};
struct Copy {
  int64_t mark, doubt, buffer, reads;
  char* words;
};

// Float32 numbers to be rounded, and results of `size` bytes an element.
struct Casts {
  int64_t tensors;
  const int64_t *from, *to, *numel, *dtype, *size;
};

// See `renewal.RenewalTable`.
struct Table {
  int64_t sharers;
  Sharer* const* sharer;  // in the order of the state's versions
  Memory* const* shared;
  int64_t memories;
  Memory* const* memory;
  const int64_t* roster;
  int64_t copies;
  Copy* const* copy;  // in the order of the state's sample, which has `bytes` of each weight, from `offset` on
  Memory* const* source;
  const int64_t *buffer, *offset, *bytes;
  c10::TensorImpl *const *weight, *const *tensor;
  const int64_t* const* object;  // the tensor's object in Python, whose first field is its reference count
  c10::StorageImpl* const* storage;
  Casts casts;
  int64_t *tensor_owners, *object_owners, *storage_owners;  // as noted when all copies could be overwritten
  int64_t *mark, *doubt;  // of each copy's memory when the copies were looked at
  int64_t *stale, *version;
  char* sampled;
  State* state;
};

// Notes what was read when the copies were looked at: they are fresh now.
void note(const Table& table) {
  const State& state = *table.state;
  std::memcpy(state.version, table.version, state.counters * sizeof(int64_t));
  std::memcpy(state.sampled, table.sampled, state.runs * 64 + state.words * 4);
}

bool is_as_noted(const Table& table, bool step_open = false) {
  for (int64_t i = 0; i < table.memories; ++i)
    if (table.memory[i]->roster != table.roster[i] || table.memory[i]->step_open != step_open) return false;
  for (int64_t i = 0; i < table.copies; ++i)
    if (table.copy[i]->buffer != table.buffer[i]) return false;
  return true;
}

// A mark that no memory had. It is negative: Python's are positive.
int64_t new_mark() {
  static int64_t last = 0;
  return --last;
}

// Gives all memory that was written one new mark, which makes its copies stale.
void mark_written(const Table& table) {
  const int64_t mark = new_mark();
  for (int64_t i = 0; i < table.sharers; ++i)  // all marks first: see `Memory.examine`
    if (table.sharer[i]->seen != table.version[i]) table.shared[i]->mark = mark;
  for (int64_t i = 0; i < table.sharers; ++i) table.sharer[i]->seen = table.version[i];
}

// Calls `act` with each number of owners, and where it is noted.
template <typename Act> void for_owners(const Table& table, Act act) {
  for (int64_t i = 0; i < table.copies; ++i) {
    act(int64_t(c10::raw::intrusive_ptr::use_count(table.tensor[i])), table.tensor_owners[i]);
    act(*table.object[i], table.object_owners[i]);
    act(int64_t(c10::raw::intrusive_ptr::use_count(table.storage[i])), table.storage_owners[i]);
  }
}

int64_t find_stale(const Table& table) {
  int64_t found = 0;
  for (int64_t i = 0; i < table.copies; ++i) {
    const Copy& copy = *table.copy[i];
    table.mark[i] = table.source[i]->mark;
    table.doubt[i] = table.source[i]->doubt;
    table.stale[i] = copy.mark != table.mark[i];
    found += table.stale[i];
    const char* sampled = table.sampled + table.offset[i];
    const auto same = [&] { return !std::memcmp(copy.words, sampled, table.bytes[i]); };
    if (!table.stale[i] && !(copy.doubt == table.doubt[i] && same())) return -1;
  }
  return found;
}

void cast_chunk(const Casts& casts, const Chunk& c) {
  const float* from = pointer<float>(casts.from[c.tensor], c.begin);
  const int64_t n = c.end - c.begin;
  with_dtype(casts.dtype[c.tensor], [&](auto value) {
    if (casts.size[c.tensor] == 2) {
      auto* to = pointer<decltype(value)>(casts.to[c.tensor], c.begin);
      for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]);
    } else {
      float* to = pointer<float>(casts.to[c.tensor], c.begin);
      for (int64_t i = 0; i < n; ++i) {
        narrow(from[i], value);
        to[i] = widen(value);
      }
    }
  });
}

// A cast moves 6 bytes an element: one thread takes 30 us for as many as these, and waking another may take 40.
constexpr int64_t kSerialCast = 1 << 18;

// Called with Python's lock, which it lets go while it casts.
template <typename Choose> void cast_chosen(const Casts& casts, int threads, Choose chosen) {
  std::vector<Chunk> chunks = chunks_of(casts.tensors, casts.numel);
  std::erase_if(chunks, [&](const Chunk& c) { return !chosen(c.tensor); });
  void* const thread = PyEval_SaveThread();
  for_each_chunk(chunks, threads, [&](const Chunk& c, int64_t) { cast_chunk(casts, c); }, kSerialCast);
  PyEval_RestoreThread(thread);
}

// The memory of weights, kept alive until their casts are done.
using Held = std::vector<c10::Storage>;

// Marks the stale copies as invalid, for they are about to be written; nothing if a weight isn't where the table says.
std::unique_ptr<Held> begin(const Table& table) {
  if (!is_as_noted(table)) return nullptr;  // another thread has freed a copy
  auto held = std::make_unique<Held>();
  for (int64_t i = 0; i < table.copies; ++i) {
    if (!table.stale[i]) continue;
    const c10::TensorImpl* weight = table.weight[i];
    if (c10::raw::intrusive_ptr::use_count(table.weight[i]) == 0 || address_of(*weight) != table.casts.from[i])
      return nullptr;  // another thread has given it other memory
    held->push_back(weight->unsafe_storage());
  }
  for (int64_t i = 0; i < table.copies; ++i) {
    if (!table.stale[i]) continue;
    table.copy[i]->mark = table.copy[i]->reads = 0;
    table.tensor[i]->bump_version();
  }
  return held;
}

// Notes that a copy holds the weight's values at this mark.
void note_written(const Table& table, int64_t i, int64_t doubt, int64_t mark) {
  Copy& copy = *table.copy[i];
  copy.doubt = doubt;
  std::memcpy(copy.words, table.sampled + table.offset[i], table.bytes[i]);
  copy.mark = mark;
}

void end(const Table& table) {
  for (int64_t i = 0; i < table.copies; ++i)
    if (table.stale[i]) note_written(table, i, table.doubt[i], table.mark[i]);
  note(table);
}

void open(const Table& table) {
  for (int64_t i = 0; i < table.memories; ++i) table.memory[i]->step_open = 1;
  for (int64_t i = 0; i < table.copies; ++i) table.copy[i]->mark = 0;
}

bool close(const Table& table) {
  if (!is_in_place(*table.state) || !is_as_noted(table, true)) return false;
  for (int64_t i = 0; i < table.copies; ++i)
    if (table.copy[i]->mark) return false;  // another thread has cast it meanwhile, from weights of before the step
  read(*table.state, table.version, table.sampled);
  const int64_t mark = new_mark();
  for (int64_t i = 0; i < table.memories; ++i) table.memory[i]->mark = mark;
  for (int64_t i = 0; i < table.sharers; ++i) table.sharer[i]->seen = table.version[i];
  for (int64_t i = 0; i < table.copies; ++i) {
    table.copy[i]->reads = 0;
    note_written(table, i, table.source[i]->doubt, mark);
  }
  for (int64_t i = 0; i < table.memories; ++i) table.memory[i]->step_open = 0;
  return true;
}

template <typename Act> int64_t guarded(int64_t failed, Act act) {
  try {
    return act();
  } catch (const std::exception&) {  // memory that a tensor doesn't give out any more
    return failed;
  }
}
}  // namespace

extern "C" {

int64_t unchanged(const State* state) {
  return guarded(0, [&] { return is_in_place(*state) && is_unwritten(*state); });
}

// Marks what was written since, and returns how many copies are stale; -1 if anything else changed.
int64_t find_stale_copies(const Table* table) {
  return guarded(-1, [&]() -> int64_t {
    if (!is_in_place(*table->state) || !is_as_noted(*table)) return -1;
    read(*table->state, table->version, table->sampled);
    mark_written(*table);
    const int64_t stale = find_stale(*table);
    if (!stale) note(*table);
    return stale;
  });
}

// Has each copy as many owners as were noted? A copy that was freed meanwhile, in Python, has another buffer.
int64_t owned_as_noted(const Table* table) {
  bool same = is_as_noted(*table);
  if (same) for_owners(*table, [&](int64_t owners, int64_t noted) { same &= owners == noted; });
  return same;
}

int64_t note_owners(const Table* table) {
  if (is_as_noted(*table)) for_owners(*table, [](int64_t owners, int64_t& noted) { noted = owners; });
  return 1;
}

// Casts the weights whose copies were stale; 0 if one isn't where the table says, and nothing was cast.
int64_t cast_stale(const Table* table, int64_t threads) {
  return guarded(0, [&] {
    const auto held = begin(*table);
    if (!held) return 0;
    cast_chosen(table->casts, int(threads), [&](int64_t i) { return table->stale[i]; });
    end(*table);
    return 1;
  });
}

// The same in two calls, for casts by others in between: what `end_cast` takes, or 0.
int64_t begin_cast(const Table* table) {
  return guarded(0, [&] { return reinterpret_cast<int64_t>(begin(*table).release()); });
}

int64_t end_cast(const Table* table, Held* held, int64_t written) {
  const std::unique_ptr<Held> freed(held);
  if (written) end(*table);
  return 1;
}

// Begins a step that writes all these weights and their copies, none of which is stale; until it is closed none counts
// as fresh.
int64_t open_step(const Table* table) {
  open(*table);
  return 1;
}

// Ends the step: the copies hold the weights' values. 0 if anything else changed.
int64_t close_step(const Table* table) {
  return guarded(0, [&] { return close(*table); });
}

int64_t cast_all(const Casts* casts, int64_t threads) {
  cast_chosen(*casts, int(threads), [](int64_t) { return true; });
  return 1;
}

// Copies the 64 bytes at each of `runs` addresses, then the 4 bytes at each of `words` addresses, to `out`.
int64_t read_words(int64_t runs, const int64_t* run, int64_t words, const int64_t* word, char* out) {
  for (int64_t i = 0; i < runs; ++i, out += 64) std::memcpy(out, pointer<char>(run[i], 0), 64);
  for (int64_t i = 0; i < words; ++i, out += 4) std::memcpy(out, pointer<char>(word[i], 0), 4);
  return 1;
}
}

// Is the state of tensors and storages what it was? A library of its own, as it needs headers of torch.
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <cstring>
#include <exception>

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

bool is_unchanged(const State* state) {
  for (int64_t i = 0; i < state->tensors; ++i)
    if (c10::raw::intrusive_ptr::use_count(state->tensor[i]) == 0) return false;
  for (int64_t i = 0; i < state->counters; ++i) {
    auto& counter = *state->counter[i];
    if (counter.is_inference() || counter.version_counter().current_version() != state->version[i]) return false;
  }
  for (int64_t i = 0; i < state->weights; ++i)
    if (address_of(*state->weight[i]) != state->address[i]) return false;
  for (int64_t i = 0; i < state->storages; ++i)
    if (c10::raw::intrusive_ptr::use_count(state->storage[i]) != state->users[i]) return false;
  const char* sampled = state->sampled;
  for (int64_t i = 0; i < state->runs; ++i, sampled += 64)
    if (std::memcmp(state->run[i], sampled, 64)) return false;
  for (int64_t i = 0; i < state->words; ++i, sampled += 4)
    if (std::memcmp(state->word[i], sampled, 4)) return false;
  return true;
}
}  // namespace

extern "C" int unchanged(const State* state) {
  try {
    return is_unchanged(state);
  } catch (const std::exception&) {  // memory that a tensor doesn't give out any more
    return 0;
  }
}

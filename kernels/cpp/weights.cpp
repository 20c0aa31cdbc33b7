// Which copies of weights still hold their weights' numbers, by the rule in docs/weights.md; and casts on the CPU.
// Python's lock is held in every function; casts and comparisons let it go. Handles are addresses that `drop` takes back.
#include <c10/core/TensorImpl.h>

#include <array>
#include <atomic>
#include <exception>
#include <unordered_map>
#include <unordered_set>

#include "chunks.h"

struct Object;  // of Python, whose first field is its reference count, and whose second is its type
extern "C" {
extern char _Py_NoneStruct[];
Object* PyList_New(ssize_t);
int PyList_SetItem(Object*, ssize_t, Object*);
Object* PyTuple_GetItem(Object*, ssize_t);
void Py_IncRef(Object*);
void Py_DecRef(Object*);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {
template <typename T> using Ptr = c10::intrusive_ptr<T>;
template <typename T> int64_t uses_of(T* object) { return int64_t(c10::raw::intrusive_ptr::use_count(object)); }

int64_t new_mark() {
  static int64_t last = 0;
  return ++last;
}

int32_t references(const void* object) { return *static_cast<const int32_t*>(object); }

// A version counter: the only field of this class is a pointer to it, which torch gives nobody.
const Ptr<c10::intrusive_ptr_target>& counter_in(const c10::VariableVersion& version) {
  return reinterpret_cast<const Ptr<c10::intrusive_ptr_target>&>(version);
}

const void* counter_of(const c10::TensorImpl& tensor) { return counter_in(tensor.version_counter()).get(); }

// Who holds a storage: tensors in C++, and its Python object if that is held itself, which is made once and kept.
int64_t holders(c10::StorageImpl* storage) {
  const void* const wrapper = storage->pyobj_slot()->load_pyobj();
  return uses_of(storage) - (wrapper && references(wrapper) == 1);
}

const char* address_of(const c10::TensorImpl& tensor) {
  if (!tensor.unsafe_storage() || tensor.numel() == 0) return nullptr;
  const auto begin = static_cast<const char*>(tensor.unsafe_storage().data());
  return begin + tensor.storage_offset() * int64_t(tensor.itemsize());
}

struct Counter {
  c10::VariableVersion version;  // held, so that no other counter gets its address
  int64_t seen;
};

struct Copy;

// A storage that copies were made from. `mark`: replaced after each write; `doubt`: after each possible write.
struct Memory : c10::intrusive_ptr_target {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other storage gets its address
  c10::StorageImpl* at;
  std::vector<Counter> counters;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> exported;  // that arrays and capsules hold
  std::vector<Copy*> copies;
  int64_t mark = new_mark(), doubt = new_mark();
  int64_t ours = 0, looked = 0;  // holders that are casts of ours; the last look
  bool explained = true, trainable = false, open = false;

  explicit Memory(const c10::Storage& s) : storage(s.getWeakStorageImpl()), at(s.unsafeGetStorageImpl()) {}
  ~Memory() override;
};

std::unordered_map<const void*, Memory*> memories;
Memory::~Memory() { memories.erase(at); }

struct Copy : c10::intrusive_ptr_target {
  Ptr<Memory> memory;
  const char* begin;
  std::vector<int64_t> sizes, strides;
  caffe2::TypeMeta type;
  int64_t numel, dtype;  // of the rounded numbers, see `native.DTYPE_CODES`
  bool castable, fixed = false;  // by C++; written in place whoever holds it
  int64_t trials, trial;  // calls in a row that must find the weight unwritten before the copy is kept; those to come
  std::vector<const char*> run, word;
  std::vector<char> sampled;
  int64_t sample_mark = 0, mark = 0, doubt = 0, next_mark = 0, next_doubt = 0;  // mark 0: invalid
  Object* buffer = nullptr;
  c10::TensorImpl* tensor = nullptr;  // of the buffer

  ~Copy() override {
    auto& all = memory->copies;
    all.erase(std::find(all.begin(), all.end(), this));
    if (buffer) Py_DecRef(buffer);
  }
  bool is_of(const c10::TensorImpl& weight) const {
    return weight.unsafe_storage().unsafeGetStorageImpl() == memory->at && address_of(weight) == begin &&
        weight.dtype() == type && weight.sizes().equals(sizes) && weight.strides().equals(strides);
  }
  bool writable() const {
    if (!buffer || fixed) return buffer;
    return references(buffer) == 1 && uses_of(tensor) == 1 && tensor->unsafe_storage() &&
        holders(tensor->unsafe_storage().unsafeGetStorageImpl()) == 1;
  }
};

struct Set : c10::intrusive_ptr_target {
  std::vector<Copy*> copies;  // Python holds them
  std::vector<int64_t> slots;
  std::vector<const void*> counters;
};

struct Step : c10::intrusive_ptr_target {
  struct Lent { Ptr<Copy> copy; Object* buffer; int64_t doubt; };
  std::vector<Ptr<Memory>> opened;
  std::vector<Lent> lent;
  std::unordered_set<const void*> counters;
};

bool running = false;  // an optimizer
int64_t passes = 0, tensor_at = 0;
const void* tensor_types[2];
Counter ticks{c10::VariableVersion(0), 0};

Object* none() {
  const auto object = reinterpret_cast<Object*>(_Py_NoneStruct);
  Py_IncRef(object);
  return object;
}

c10::TensorImpl* tensor_of(Object* object) {
  const void* type = reinterpret_cast<const void* const*>(object)[1];
  if (type != tensor_types[0] && type != tensor_types[1]) return nullptr;
  return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(object) + tensor_at);
}

// Signals 2 and 5 of the rule, for one storage; 3 and 4 are reported.
void look(Memory& m) {
  int64_t sharing = m.ours;
  for (Counter& each : m.counters) {
    if (const int64_t now = each.version.current_version(); now != each.seen) m.mark = new_mark(), each.seen = now;
    sharing += counter_in(each.version).use_count() - 1;
  }
  const size_t before = m.exported.size();
  std::erase_if(m.exported, [](const auto& each) { return each.expired(); });
  const bool explained = before == 0 && uses_of(m.at) && holders(m.at) == sharing;
  if (!explained || !m.explained) m.doubt = new_mark();
  m.explained = explained;
}

// Are the weight's numbers still in its storage, which may have been freed or resized?
bool in_storage(const Copy& c, const c10::StorageImpl& storage) {
  const auto from = static_cast<const char*>(storage.data());
  const int64_t size = c.numel * int64_t(c.type.itemsize());
  return !size || (from && c.begin >= from && c.begin + size <= from + storage.nbytes());
}

// Signal 6. The sample is read anew after each write.
void look_at_sample(Copy& c) {
  if (!uses_of(c.memory->at) || !in_storage(c, *c.memory->at)) {
    c.memory->mark = new_mark();
    return;
  }
  if (c.sampled.empty()) return;
  const bool known = c.sample_mark == c.memory->mark;
  char* sampled = c.sampled.data();
  bool same = true;
  const auto read = [&](const char* at, size_t size) {
    if (!known || std::memcmp(at, sampled, size)) same = false, std::memcpy(sampled, at, size);
    sampled += size;
  };
  for (const char* at : c.run) read(at, 64);
  for (const char* at : c.word) read(at, 4);
  if (known && !same) c.memory->mark = new_mark();
  c.sample_mark = c.memory->mark;
}

template <typename Copies> void look_at(const Copies& copies) {
  if (const int64_t now = ticks.version.current_version(); now != ticks.seen) {
    ticks.seen = now;
    for (auto& [_, m] : memories)
      if (m->trainable) m->mark = new_mark();
  }
  const int64_t now = new_mark();
  for (Copy* c : copies) if (c->memory->looked != now) c->memory->looked = now, look(*c->memory);
  for (Copy* c : copies) look_at_sample(*c);
}

enum Status : int64_t { kFresh, kDoubtful, kStale };

Status status(const Copy& c) {
  if (!c.buffer || running || c.memory->open || c.mark != c.memory->mark) return kStale;
  return c.doubt == c.memory->doubt ? kFresh : kDoubtful;
}

void admit(Memory& m, const c10::TensorImpl& tensor, bool trainable) {
  if (trainable && !m.trainable) m.trainable = true, m.doubt = new_mark();
  const void* key = counter_of(tensor);
  if (!key) return;
  for (const Counter& each : m.counters) if (counter_in(each.version).get() == key) return;
  look(m);  // before those are dropped that nobody holds
  std::erase_if(m.counters, [](const Counter& each) { return counter_in(each.version).use_count() == 1; });
  m.counters.push_back({tensor.version_counter(), int64_t(tensor.version_counter().current_version())});
  m.doubt = new_mark();  // it may have written before
}

bool matches(const Set& set, Object* inputs) {
  for (size_t i = 0; i < set.slots.size(); ++i) {
    const c10::TensorImpl* weight = tensor_of(PyTuple_GetItem(inputs, set.slots[i]));
    if (!weight || !set.counters[i] || counter_of(*weight) != set.counters[i]) return false;
    Memory& m = *set.copies[i]->memory;
    if (!set.copies[i]->is_of(*weight)) return false;
    if (!m.trainable && weight->requires_grad()) m.trainable = true, m.doubt = new_mark();
  }
  return true;
}

Object* buffers(const Set& set) {
  for (const Copy* c : set.copies) if (!c->buffer) return none();  // its weight was freed
  Object* const list = PyList_New(set.copies.size());
  for (size_t i = 0; i < set.copies.size(); ++i) {
    Py_IncRef(set.copies[i]->buffer);
    PyList_SetItem(list, i, set.copies[i]->buffer);
  }
  return list;
}

// Calls `body` with each chunk of the weights and their copies, without Python's lock; false if a weight has moved.
template <typename Body> bool for_numbers(const std::vector<Copy*>& copies, int threads, Body body) {
  std::vector<c10::Storage> held;  // whatever other threads free meanwhile
  std::vector<int64_t> numel;
  for (const Copy* c : copies) {
    auto storage = c->memory->storage.lock();
    if (!storage || !in_storage(*c, *storage)) return false;
    held.emplace_back(std::move(storage));
    held.push_back(c->tensor->unsafe_storage());
    numel.push_back(c->numel);
  }
  const std::vector<Chunk> chunks = chunks_of(int64_t(copies.size()), numel.data());
  std::vector<char*> to;
  for (const Copy* c : copies) to.push_back(static_cast<char*>(c->tensor->unsafe_storage().mutable_data()));
  for (Copy* c : copies) ++c->memory->ours;
  void* const thread = PyEval_SaveThread();
  // A cast moves 6 bytes an element: one thread takes 30 us for as many as these, and waking another may take 40.
  for_each_chunk(chunks, threads, [&](const Chunk& c, int64_t) {
    const Copy& copy = *copies[c.tensor];
    const float* from = reinterpret_cast<const float*>(copy.begin) + c.begin;
    with_dtype(copy.dtype, [&](auto value) {
      if (copy.tensor->itemsize() == 4) body(c, from, reinterpret_cast<float*>(to[c.tensor]) + c.begin, value);
      else body(c, from, reinterpret_cast<decltype(value)*>(to[c.tensor]) + c.begin, value);
    });
  }, 1 << 18);
  PyEval_RestoreThread(thread);
  for (Copy* c : copies) --c->memory->ours;
  return true;
}

template <typename T, typename R> void round(float from, T& to, R) { narrow(from, to); }
template <typename R> void round(float from, float& to, R value) { narrow(from, value), to = widen(value); }

void begin(Copy& c) {
  if (status(c) == kDoubtful) c.memory->mark = new_mark();  // it is as good as written: no other form may count as fresh
  c.next_mark = c.memory->mark, c.next_doubt = c.memory->doubt;
  c.mark = 0;
}

// During a step nothing is fresh beyond the call.
void made(Copy& c) {
  if (c.trial) c.trial = c.trials;
  c.doubt = c.trial ? 0 : c.next_doubt;
  c.mark = running || c.memory->open ? 0 : c.next_mark;
}

bool cast(const std::vector<Copy*>& copies, int threads) {
  for (Copy* c : copies) begin(*c);
  for (Copy* c : copies) c->tensor->bump_version();
  const bool done = for_numbers(copies, threads, [](const Chunk& c, const float* from, auto* to, auto value) {
    for (int64_t i = 0; i < c.end - c.begin; ++i) round(from[i], to[i], value);
  });
  if (done) for (Copy* c : copies) made(*c);
  ++passes;
  return done;
}

std::vector<Copy*> distinct(Copy* const* copies, int64_t n) {
  std::unordered_set<Copy*> seen;
  std::vector<Copy*> found;
  for (int64_t i = 0; i < n; ++i) if (seen.insert(copies[i]).second) found.push_back(copies[i]);
  return found;
}

template <typename T, typename Act> T guarded(T failed, Act act) {
  try {
    return act();
  } catch (const std::exception&) {
    return failed;
  }
}

template <typename T> int64_t handle(Ptr<T> object) {
  return reinterpret_cast<int64_t>(static_cast<c10::intrusive_ptr_target*>(object.release()));
}
}  // namespace

extern "C" {

void set_up(int64_t at, const void* tensor, const void* parameter, const c10::TensorImpl* ticking) {
  tensor_at = at, tensor_types[0] = tensor, tensor_types[1] = parameter;
  ticks = {ticking->version_counter(), int64_t(ticking->version_counter().current_version())};
}

// What the rule reads of a tensor, for the test at load.
int64_t holders_of(Object* tensor) { return holders(tensor_of(tensor)->unsafe_storage().unsafeGetStorageImpl()); }
int64_t sharers_of(Object* tensor) { return counter_in(tensor_of(tensor)->version_counter()).use_count(); }

void drop(c10::intrusive_ptr_target* object) { Ptr<c10::intrusive_ptr_target>::reclaim(object); }

int64_t add_copy(Object* weight, int64_t dtype, int64_t castable, int64_t trial, int64_t runs, const char* const* run,
                 int64_t words, const char* const* word) {
  const c10::TensorImpl& tensor = *tensor_of(weight);
  auto copy = c10::make_intrusive<Copy>();
  Memory*& known = memories[tensor.unsafe_storage().unsafeGetStorageImpl()];
  copy->memory = known ? Ptr<Memory>::reclaim_copy(known) : c10::make_intrusive<Memory>(tensor.unsafe_storage());
  known = copy->memory.get();
  known->copies.push_back(copy.get());
  copy->begin = address_of(tensor), copy->type = tensor.dtype(), copy->numel = tensor.numel();
  copy->sizes = tensor.sizes().vec(), copy->strides = tensor.strides().vec();
  copy->dtype = dtype, copy->castable = castable, copy->trial = copy->trials = trial;
  copy->run.assign(run, run + runs), copy->word.assign(word, word + words);
  copy->sampled.resize(64 * runs + 4 * words);
  return handle(std::move(copy));
}

// Begins to watch writes by way of this tensor, if its storage is watched.
void watch(Object* object, int64_t trainable) {
  const c10::TensorImpl* tensor = tensor_of(object);
  if (!tensor || !tensor->unsafe_storage()) return;
  const auto found = memories.find(tensor->unsafe_storage().unsafeGetStorageImpl());
  if (found != memories.end()) admit(*found->second, *tensor, trainable || tensor->requires_grad());
}

void put(Copy* copy, Object* buffer) {
  Object* const before = copy->buffer;
  copy->mark = 0;
  copy->buffer = buffer == reinterpret_cast<Object*>(_Py_NoneStruct) ? nullptr : buffer;
  copy->tensor = copy->buffer ? tensor_of(buffer) : nullptr;
  if (copy->buffer) Py_IncRef(buffer);
  if (before) Py_DecRef(before);
}

Object* buffer_of(const Copy* copy) {
  if (!copy->buffer) return none();
  Py_IncRef(copy->buffer);
  return copy->buffer;
}

void fix(Copy* copy) { copy->fixed = true; }

int64_t add_set(int64_t n, Copy* const* copies, const int64_t* slots, Object* inputs) {
  auto set = c10::make_intrusive<Set>();
  set->copies.assign(copies, copies + n), set->slots.assign(slots, slots + n);
  for (int64_t i = 0; i < n; ++i) set->counters.push_back(counter_of(*tensor_of(PyTuple_GetItem(inputs, slots[i]))));
  return handle(std::move(set));
}

// The list of a set's buffers, if all are fresh; stale ones are cast before if `threads` isn't 0 and nothing else needs
// to be done. Else None.
Object* read_copies(const Set* set, Object* inputs, int64_t threads) {
  return guarded<Object*>(nullptr, [&] {
    if (running || !matches(*set, inputs)) return none();
    look_at(set->copies);
    std::vector<Copy*> stale;
    for (Copy* c : set->copies) {
      const Status found = status(*c);
      if (found == kFresh) continue;
      if (!threads || found == kDoubtful || !c->castable || c->memory->open || !c->writable()) return none();
      stale.push_back(c);
    }
    if (!stale.empty() && !cast(distinct(stale.data(), stale.size()), int(threads))) return none();
    return buffers(*set);
  });
}

Object* buffers_of(const Set* set) { return buffers(*set); }

int64_t is_set_of(const Set* set, Object* inputs) { return guarded(0, [&] { return int(matches(*set, inputs)); }); }

// Looks, and gives the status of each copy, plus 4 if it can't be overwritten.
void statuses(int64_t n, Copy* const* copies, int64_t* found) {
  guarded(0, [&] {
    look_at(std::vector<Copy*>(copies, copies + n));
    return 0;
  });
  for (int64_t i = 0; i < n; ++i) found[i] = status(*copies[i]) + (copies[i]->writable() ? 0 : 4);
}

// Compares all bits of copies and rounded weights; those that are equal are fresh.
void compare(int64_t n, Copy* const* copies, int64_t threads, int64_t* equal) {
  const std::vector<Copy*> all(copies, copies + n);
  std::vector<int64_t> doubts;
  for (const Copy* c : all) doubts.push_back(c->memory->doubt);
  std::vector<std::atomic<bool>> differs(n);
  const bool done = for_numbers(all, int(threads), [&](const Chunk& c, const float* from, auto* to, auto value) {
    for (int64_t i = 0; i < c.end - c.begin; ++i) {
      auto expected = to[i];
      round(from[i], expected, value);
      if (std::memcmp(&expected, &to[i], sizeof(expected))) return void(differs[c.tensor] = true);
    }
  });
  for (int64_t i = 0; i < n; ++i) {
    if (!(equal[i] = done && !differs[i])) continue;
    if (all[i]->trial) --all[i]->trial;
    all[i]->doubt = all[i]->trial ? 0 : doubts[i];
  }
}

int64_t cast_all(int64_t n, Copy* const* copies, int64_t threads) {
  return guarded(0, [&] { return int(cast(std::vector<Copy*>(copies, copies + n), int(threads))); });
}

// Around casts by others: until `note_made` the copies are invalid.
void note_begun(int64_t n, Copy* const* copies) {
  ++passes;
  for (int64_t i = 0; i < n; ++i) begin(*copies[i]);
}

void note_made(int64_t n, Copy* const* copies) {
  for (int64_t i = 0; i < n; ++i) made(*copies[i]);
}

// A form of the same weight holds the same numbers as the one that it was made of; 0 if that was cast again since.
int64_t note_made_of(Copy* copy, const Copy* of) {
  if (copy->mark && copy->mark != of->mark) return 0;
  copy->mark = of->mark, copy->doubt = of->doubt;
  return 1;
}

int64_t count_passes() { return passes; }
void set_running(int64_t now) { running = now; }

// Reports about storages: 0: surely written, 1: if it is trainable, 2: perhaps.
void report(int64_t n, const void* const* storages, int64_t what) {
  for (int64_t i = 0; i < n; ++i) {
    const auto found = memories.find(storages[i]);
    if (found == memories.end() || (what == 1 && !found->second->trainable)) continue;
    (what == 2 ? found->second->doubt : found->second->mark) = new_mark();
  }
}

// Something that isn't known holds this tensor, and may write as long as it lives.
void note_export(Object* object) {
  c10::TensorImpl* tensor = tensor_of(object);
  const auto found = memories.find(tensor->unsafe_storage().unsafeGetStorageImpl());
  if (found == memories.end()) return;
  found->second->exported.emplace_back(Ptr<c10::TensorImpl>::reclaim_copy(tensor));
  found->second->doubt = new_mark();
}

// Begins a step that writes these weights: gives the list of the copies that it may write, which are invalid until
// `close_step`, and their weights' indices. Nothing on these storages is fresh until then.
Object* open_step(Object* params, int64_t n, int64_t* opened, int64_t* indices, Copy** lent, int64_t room) {
  auto step = c10::make_intrusive<Step>();
  for (int64_t i = 0; i < n; ++i) {
    c10::TensorImpl* weight = tensor_of(PyTuple_GetItem(params, i));
    if (!weight || !weight->unsafe_storage()) continue;
    const auto found = memories.find(weight->unsafe_storage().unsafeGetStorageImpl());
    if (found == memories.end()) continue;
    Memory& m = *found->second;
    step->counters.insert(counter_of(*weight));
    step->opened.push_back(Ptr<Memory>::reclaim_copy(&m));
    if (m.open) m.mark = new_mark(), m.open = false;  // a step that failed may have written before it raised a version
    for (Copy* c : m.copies) {
      if (!c->is_of(*weight) || !c->tensor || c->tensor->itemsize() != 2 || int64_t(step->lent.size()) == room) continue;
      look_at(std::array<Copy*, 1>{c});
      if (status(*c) != kFresh || !c->writable()) continue;
      indices[step->lent.size()] = i, lent[step->lent.size()] = c;
      step->lent.push_back({Ptr<Copy>::reclaim_copy(c), c->buffer, c->doubt});
    }
  }
  for (auto& m : step->opened) m->open = true;
  Object* const list = PyList_New(step->lent.size());
  for (size_t i = 0; i < step->lent.size(); ++i) {
    step->lent[i].copy->mark = 0;
    Py_IncRef(step->lent[i].buffer);
    PyList_SetItem(list, i, step->lent[i].buffer);
  }
  *opened = handle(std::move(step));
  return list;
}

// Ends it: the lent copies hold the weights' new values, unless others wrote as well.
void close_step(const Step* step) {
  std::unordered_set<const void*> foreign;
  for (const auto& m : step->opened) {
    for (Counter& each : m->counters) {
      const int64_t now = each.version.current_version();
      if (now != each.seen && !step->counters.count(counter_in(each.version).get())) foreign.insert(m.get());
      each.seen = now;
    }
    m->open = false, m->mark = new_mark();
  }
  for (const auto& [c, buffer, doubt] : step->lent) {
    look_at_sample(*c);  // the first look at this mark
    if (!c->mark && c->buffer == buffer && !foreign.count(c->memory.get())) c->mark = c->memory->mark, c->doubt = doubt;
  }
}
}

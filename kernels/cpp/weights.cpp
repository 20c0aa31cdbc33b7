// Which copies of weights still hold their weights' numbers, by the rule in docs/weights.md; and casts on the CPU.
// Any thread may call: Python's lock is held in every function; only `for_numbers`, which casts and compares, lets it go.
// Who may cast (`read_copies` with threads, `renew_all`) holds `CopyStore.lock` too, so that no two write one buffer. All
// hold the copies that they pass, as Python's objects. A handle is an address that owns its copy; `drop` takes it.
#include <atomic>
#include <unordered_map>

#include "chunks.h"
#include "objects.h"

namespace {
using Target = c10::intrusive_ptr_target;
template <typename T> using Ptr = c10::intrusive_ptr<T>;
template <typename T> int64_t uses_of(T* object) { return int64_t(c10::raw::intrusive_ptr::use_count(object)); }
template <typename T> Ptr<T> hold(T* object) { return Ptr<T>::reclaim_copy(object); }
template <typename T> int64_t handle(Ptr<T> object) { return reinterpret_cast<int64_t>(object.release()); }
int32_t references(const void* object) { return *static_cast<const int32_t*>(object); }  // newer Pythons: flags above
int64_t new_mark() { static int64_t last = 0; return ++last; }  // one clock for writes, looks, casts, launches; never 0
Object* given(Object* object) { Py_IncRef(object); return object; }
Object* const none = reinterpret_cast<Object*>(_Py_NoneStruct);

Object *keys, *steps;  // sets of Python's: of the storages in the table, which it keeps up to date; of steps that run
bool running = false;  // an optimizer, as `steps` says
bool recording = false;  // a CUDA graph of a whole step
constexpr int64_t kUnread = 16;  // updates of a weight for which a copy stays that no graph reads
int64_t passes = 0;  // refreshes so far, `weight_stats().casts`
void ask_steps() { running = PySet_Size(steps) > 0; }
void change_keys(int (*change)(Object*, Object*), void* key) {
  Object* const number = PyLong_FromVoidPtr(key);
  change(keys, number), Py_DecRef(number);
}

struct Counter {
  c10::VariableVersion version;  // held, so that no other counter gets its address
  int64_t seen, at_open = 0;  // the version at the last look; at the begin of the step that runs
  bool shared_elsewhere = false;  // by tensors that were given other memory: it can't count this storage's holders
  explicit Counter(const c10::VariableVersion& v) : version(v), seen(v.current_version()) {}
  // Torch has no function that gives the counter itself: the class has one field, a pointer to it, and is read as that.
  static const Ptr<Target>& pointer(const c10::VariableVersion& v) { return reinterpret_cast<const Ptr<Target>&>(v); }
  static const void* of(const TensorImpl& tensor) { return pointer(tensor.version_counter()).get(); }
  const void* key() const { return pointer(version).get(); }
  int64_t sharers() const { return int64_t(pointer(version).use_count()) - 1; }
  bool take_change() { const int64_t before = seen; return before != (seen = version.current_version()); }
};
Counter ticks{c10::VariableVersion(0)};
// Counters of tensors that were given other memory, and have not been read since. Views of the former memory still share
// them: counted as holders of the new memory, they would hide an alias there.
std::vector<Counter> address_changed;

// Who holds a storage: tensors, and its Python object, which is made once and kept, if that is held itself.
int64_t holders(c10::StorageImpl* storage) {
  const void* const wrapper = storage->pyobj_slot()->load_pyobj();
  return uses_of(storage) - (wrapper && references(wrapper) == 1);
}

// The signals of the rule, by number: 1 address and counter (`is_set_of`, `is_of`), 2 version, 3 an optimizer's step and
// 4 memory handed out (`report`, by Python), 5 holders, 6 sample.
//
// A storage that copies were made from. A write that is seen replaces `mark`, one that is only possible `maybe_written`.
// A copy keeps the two that its memory had as it was cast. While both are the same it is fresh; if only `mark` is, it is
// doubtful, until a comparison shows that it still holds; else it is stale: see `Copy::status`.
struct Memory : Target {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other storage gets its address
  c10::StorageImpl* at;
  std::vector<Counter> counters;
  std::vector<struct Copy*> copies;
  int64_t mark = new_mark(), maybe_written = new_mark(), checked = 0;
  int64_t casts_in_flight = 0;  // each holds the storage while Python's lock is free: it is no alias of the user's
  const int64_t born = new_mark();  // a graph that was captured before may write it, which nobody noted
  int64_t noted_mark = 0, noted_maybe_written = 0;  // as the capture of a graph began
  bool only_watched_holders = true;  // when last checked: else somebody held it whose writes raise no watched counter
  bool trainable = false, step_open = false;
  int64_t mark_at_open = 0;  // as the step that runs began

  static std::unordered_map<const void*, Memory*> all;
  static Memory* of(const TensorImpl* tensor) {
    const auto found = tensor ? all.find(tensor->unsafe_storage().unsafeGetStorageImpl()) : all.end();
    return found == all.end() ? nullptr : found->second;
  }
  explicit Memory(const c10::Storage& s) : storage(s.getWeakStorageImpl()), at(s.unsafeGetStorageImpl()) {
    all[at] = this, change_keys(PySet_Add, at);
  }
  ~Memory() override { all.erase(at), change_keys(PySet_Discard, at); }

  // Signals 2 and 5. Now and at the last check every holder of the storage must be a tensor that shares a counter which
  // is watched: another one (`.data`, a NumPy array) may write without raising any, and be gone.
  void check_signals() {
    int64_t sharing = casts_in_flight;
    bool together = true;
    for (Counter& each : counters) {
      if (each.take_change()) mark = new_mark();
      sharing += each.sharers();
      if (each.sharers() < 2) each.shared_elsewhere = false;  // the views of its former memory are gone
      together &= !each.shared_elsewhere;
    }
    const bool all_watched = together && uses_of(at) && holders(at) == sharing;
    // Also at the check after one that found another holder: it may have written since, and let go.
    if (!all_watched || !only_watched_holders) maybe_written = new_mark();
    only_watched_holders = all_watched;
  }
  bool written() const { return mark != noted_mark || maybe_written != noted_maybe_written; }  // since then, perhaps
  void set_trainable() { if (!trainable) trainable = true, maybe_written = new_mark(); }
  void register_weight(const TensorImpl& tensor) {
    const void* key = Counter::of(tensor);
    if (!key || std::any_of(counters.begin(), counters.end(), [&](auto& each) { return each.key() == key; })) return;
    // First: the tensor, which may have written before, holds the memory by a counter that isn't watched yet; and of
    // counters that nobody holds the last writes would be forgotten.
    check_signals();
    std::erase_if(counters, [](const Counter& each) { return !each.sharers(); });
    // A counter belongs to the memory that its tensor has now: counted in two, it would hide an alias in one. In the other
    // its last write would be forgotten with it, if no `note_move` told of the move.
    for (auto& [_, other] : all)
      if (std::erase_if(other->counters, [&](auto& each) { return each.key() == key; })) other->maybe_written = new_mark();
    counters.emplace_back(tensor.version_counter());
    counters.back().shared_elsewhere = std::erase_if(address_changed, [&](auto& each) { return each.key() == key; });
  }
};
std::unordered_map<const void*, Memory*> Memory::all;

enum Status : int64_t { kFresh, kDoubtful, kStale };

struct Copy : Target {
  Ptr<Memory> memory;
  const char* begin;
  std::vector<int64_t> sizes, strides;
  caffe2::TypeMeta type;
  int64_t numel, dtype;  // of the rounded numbers, see `native.DTYPE_CODES`
  bool castable;  // by C++: a float32 weight on the CPU, neither packed nor quantized
  bool fixed = false;  // written in place whoever holds it, as a captured graph has its address
  bool borrowed_by_optimizer = false;  // and not cast or replaced since: only then does the step's end make it fresh
  std::vector<const char*> places;  // of the sample; none on a GPU, whose memory the host can't read
  size_t place_bytes;
  std::vector<char> sampled;
  int64_t unread_updates = 0;  // of the weight, since a graph has read the copy
  int64_t queued = 0, made = 0, recorded = 0;  // the clock, at the last read that renewed it, cast, cast that is captured
  int64_t mark = 0, maybe_written = 0;  // the memory's, as it was cast or last compared equal; mark 0: invalid
  int64_t next_mark = 0, next_maybe_written = 0;  // the memory's, as the cast or comparison that runs began
  int64_t launch = 0, stream = 0;  // the last launch that wrote the buffer, and where; 0 on the CPU
  Object* buffer = nullptr;
  TensorImpl* tensor = nullptr;  // the buffer's

  ~Copy() override {
    std::erase(memory->copies, this);
    if (buffer) Py_DecRef(buffer);
  }
  bool is_of(const TensorImpl& weight) const {
    return weight.unsafe_storage().unsafeGetStorageImpl() == memory->at && address_of(weight) == begin &&
        !weight.is_neg() && weight.dtype() == type && weight.sizes().equals(sizes) && weight.strides().equals(strides);
  }
  bool writable() const { return tensor && (fixed || alone()); }
  bool alone() const {  // else a backward may have saved it, or a view of it, and would read the new numbers
    return tensor && references(buffer) == 1 && uses_of(tensor) == 1 && tensor->unsafe_storage() &&
        holders(tensor->unsafe_storage().unsafeGetStorageImpl()) == 1;
  }
  Status status() const {
    // While a step runs, its writes come before its report: nothing that was read meanwhile may count. Of no weight, as
    // an optimizer that isn't ours may write any.
    if (!tensor || running || memory->step_open || mark != memory->mark) return kStale;
    return maybe_written == memory->maybe_written ? kFresh : kDoubtful;
  }
  bool is_in(const c10::StorageImpl& storage) const {  // which may have been resized
    const auto from = static_cast<const char*>(storage.data());
    const int64_t size = numel * int64_t(type.itemsize());
    return !size || (from && begin >= from && begin + size <= from + storage.nbytes());
  }
  // Signal 6. While the copy's numbers may be the weight's, the sample is compared: a difference makes all copies of the
  // memory stale. Where they surely aren't it is read anew, so before each cast: it is never newer than the numbers.
  void compare_sample() {
    const bool lives = uses_of(memory->at) && is_in(*memory->at), known = mark == memory->mark;
    bool same = lives;
    char* words = sampled.data();
    for (size_t i = 0; lives && i < places.size(); ++i, words += place_bytes)
      if (!known || std::memcmp(places[i], words, place_bytes))
        same = false, std::memcpy(words, places[i], place_bytes);
    if (known && !same) memory->mark = new_mark();
  }
  void begin_cast() {
    if (mark == memory->mark && maybe_written != memory->maybe_written)
      memory->mark = new_mark();  // as good as written: a form that isn't cast must not share this one's mark
    // Invalid until `end_cast`: an error or an interrupt in between leaves half a copy.
    next_mark = memory->mark, next_maybe_written = memory->maybe_written, mark = 0, borrowed_by_optimizer = false;
  }
  // With the marks from before: a write during the cast has replaced the memory's. In a step, with none: such a cast is
  // for the call that asked for it.
  void end_cast() {
    maybe_written = next_maybe_written, mark = running || memory->step_open ? 0 : next_mark, made = new_mark();
  }
};

// Looks at the memory of these copies by signals 2 to 6, in the order of their cost.
void check(Copy* const* copies, int64_t n) {
  ask_steps();
  // A compiled step has no hooks that run: it raises this counter instead, and may have written any trainable weight.
  if (ticks.take_change()) for (auto& [_, m] : Memory::all) if (m->trainable) m->mark = new_mark();
  const int64_t now = new_mark();
  for (int64_t i = 0; i < n; ++i)
    if (Memory& m = *copies[i]->memory; m.checked != now) m.checked = now, m.check_signals();
  for (int64_t i = 0; i < n; ++i) copies[i]->compare_sample();  // last: it is read anew only where the marks say stale
}

// Calls `body` with each chunk of the weights and their copies, without Python's lock; false if a weight has moved.
template <typename Body> bool for_numbers(const std::vector<Copy*>& copies, int64_t threads, Body body) {
  struct Pair { const float* from; char* to; int64_t dtype; bool wide; };
  std::vector<c10::Storage> held;  // whatever other threads free meanwhile
  std::vector<Pair> pairs;
  std::vector<int64_t> numel;
  for (const Copy* c : copies) {
    auto storage = c->memory->storage.lock();
    if (!storage || !c->is_in(*storage)) return false;
    held.emplace_back(std::move(storage)), held.push_back(c->tensor->unsafe_storage()), numel.push_back(c->numel);
    pairs.push_back({reinterpret_cast<const float*>(c->begin), static_cast<char*>(held.back().mutable_data()), c->dtype,
                     c->tensor->itemsize() == 4});
  }
  const std::vector<Chunk> chunks = chunks_of(int64_t(copies.size()), numel.data());
  // As long as the lock is free, another thread's check must not take our hold on the storages for an alias.
  for (Copy* c : copies) ++c->memory->casts_in_flight;
  void* const thread = PyEval_SaveThread();
  // A cast moves 6 bytes an element: one thread takes 30 us for as many as these, and waking another may take 40.
  for_each_chunk(chunks, int(threads), [&](const Chunk& c, int64_t) {
    const Pair& p = pairs[c.tensor];
    with_dtype(p.dtype, [&](auto value) {
      const auto rounded = [&](float from) { narrow(from, value); return value; };
      const auto widened = [&](float from) { narrow(from, value); return widen(value); };
      if (p.wide) body(c, p.from + c.begin, reinterpret_cast<float*>(p.to) + c.begin, widened);
      else body(c, p.from + c.begin, reinterpret_cast<decltype(value)*>(p.to) + c.begin, rounded);
    });
  }, 1 << 18);
  PyEval_RestoreThread(thread);
  ask_steps();  // another thread may have begun a step while the lock was free
  for (Copy* c : copies) --c->memory->casts_in_flight;
  return true;
}

// Compares all bits of doubtful copies and rounded weights; then casts what is stale and may be overwritten.
void renew(const std::vector<Copy*>& copies, int64_t threads) {
  std::vector<Copy*> doubtful, stale;
  for (Copy* c : copies)
    if (c->status() == kDoubtful) c->next_maybe_written = c->memory->maybe_written, doubtful.push_back(c);
  std::vector<std::atomic<bool>> differs(doubtful.size());
  const bool compared = for_numbers(doubtful, threads, [&](const Chunk& c, const float* from, auto* to, auto round) {
    for (int64_t i = 0; i < c.end - c.begin; ++i)
      if (const auto expected = round(from[i]); std::memcmp(&expected, &to[i], sizeof(expected)))
        return void(differs[c.tensor] = true);
  });
  for (size_t i = 0; i < doubtful.size(); ++i)
    // The mark from before the comparison: what may have been written during it stays doubtful.
    if (compared && !differs[i]) doubtful[i]->maybe_written = doubtful[i]->next_maybe_written;
    else doubtful[i]->begin_cast();  // which makes it stale
  for (Copy* c : copies) if (c->status() == kStale && c->writable()) stale.push_back(c);
  if (stale.empty()) return;
  // The version is raised so that a backward that saved a copy which is written in place raises, instead of reading it.
  for (Copy* c : stale) c->begin_cast(), c->tensor->bump_version();
  const bool cast = for_numbers(stale, threads, [](const Chunk& c, const float* from, auto* to, auto round) {
    for (int64_t i = 0; i < c.end - c.begin; ++i) to[i] = round(from[i]);
  });
  for (Copy* c : stale) if (cast) c->end_cast();
  ++passes;
}

// Calls on a GPU: which streams have waited for the launches up to a number, the latest first.
constexpr int64_t kAnyStream = -1, kNoStream = -2, kStreams = 8;
struct Waited { int64_t stream, launch; };

// True if what is launched next on this stream comes after the casts of these copies.
bool in_order(int64_t n, Copy* const* copies, int64_t stream, const Waited* waited) {
  if (stream == kAnyStream || stream == kNoStream) return stream == kAnyStream;
  const Waited* const known = std::find_if(waited, waited + kStreams, [&](auto& each) { return each.stream == stream; });
  const int64_t until = known == waited + kStreams ? -1 : known->launch;
  return std::all_of(copies, copies + n, [&](const Copy* c) { return c->stream == stream || c->launch <= until; });
}

TensorImpl* input(Object* inputs, int64_t i) { return tensor_of(PyTuple_GetItem(inputs, i)); }

// None if the weight of one was freed.
Object* list_of(int64_t n, Copy* const* copies) {
  if (!std::all_of(copies, copies + n, [](const Copy* c) { return c->buffer; })) return given(none);
  Object* const list = PyList_New(n);
  for (int64_t i = 0; i < n; ++i) PyList_SetItem(list, i, given(copies[i]->buffer));
  return list;
}
}  // namespace

extern "C" {
void share(Object* tensor, Object* of_storages, Object* of_steps) { return guarded([&] {
  ticks = Counter(tensor_of(tensor)->version_counter()), keys = given(of_storages), steps = given(of_steps);
}); }

// What the rule reads of a tensor, for the test at load.
int64_t holders_of(Object* tensor) {
  return guarded([&] { return holders(tensor_of(tensor)->unsafe_storage().unsafeGetStorageImpl()); });
}
int64_t sharers_of(Object* tensor) {
  return guarded([&] { return Counter(tensor_of(tensor)->version_counter()).sharers(); });
}

void drop(Target* object) { Ptr<Target>::reclaim(object); }

int64_t add_copy(Object* weight, int64_t dtype, int64_t castable, int64_t n, const char* const* places,
                 int64_t place_bytes) { return guarded([&] {
  const TensorImpl& tensor = *tensor_of(weight);
  auto copy = c10::make_intrusive<Copy>();
  Memory* const known = Memory::of(&tensor);
  copy->memory = known ? hold(known) : c10::make_intrusive<Memory>(tensor.unsafe_storage());
  copy->memory->copies.push_back(copy.get());
  copy->begin = address_of(tensor), copy->type = tensor.dtype(), copy->numel = tensor.numel();
  copy->sizes = tensor.sizes().vec(), copy->strides = tensor.strides().vec();
  copy->dtype = dtype, copy->castable = castable;
  copy->places.assign(places, places + n), copy->place_bytes = place_bytes, copy->sampled.resize(n * place_bytes);
  return handle(std::move(copy));
}); }

// Begins to watch writes by way of this tensor, if its storage is watched.
void watch(Object* object, int64_t trainable) { return guarded([&] {
  const TensorImpl* const tensor = tensor_of(object);
  Memory* const memory = Memory::of(tensor);
  if (memory && (trainable || tensor->requires_grad())) memory->set_trainable();
  if (memory) memory->register_weight(*tensor);
}); }

// A tensor is about to be given other memory; views of what it has now share its counter.
void note_move(Object* object) { return guarded([&] {
  const TensorImpl* const tensor = tensor_of(object);
  if (!tensor || !Counter::of(*tensor)) return;
  std::erase_if(address_changed, [&](auto& each) { return each.sharers() < 2 || each.key() == Counter::of(*tensor); });
  if (Memory* const memory = Memory::of(tensor)) {
    std::erase_if(memory->counters, [&](auto& each) { return each.key() == Counter::of(*tensor); });
    memory->maybe_written = new_mark();
  }
  if (Counter counter(tensor->version_counter()); counter.sharers() > 1) address_changed.push_back(counter);
}); }

void put(Copy* copy, Object* buffer) { return guarded([&] {
  Object* const before = copy->buffer;
  copy->mark = 0, copy->borrowed_by_optimizer = false;
  copy->buffer = buffer == none ? nullptr : given(buffer);
  copy->tensor = buffer == none ? nullptr : tensor_of(buffer);
  if (before) Py_DecRef(before);  // last: code of Python's that runs as the tensor is freed finds all in place
}); }

Object* buffer_of(const Copy* copy) { return guarded([&] { return given(copy->buffer ? copy->buffer : none); }); }
void fix(Copy* copy) { copy->fixed = true; }

// A set is what a graph reads: its copies, where its inputs have their weights, and the addresses of these weights'
// counters. Nothing holds those: a new counter may get an old one's address. But then it isn't watched, so there are more
// holders than signal 5 knows of, and the copies are compared.
void note_counters(int64_t n, const int64_t* slots, Object* inputs, const void** counters) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i) counters[i] = Counter::of(*input(inputs, slots[i]));
}); }

int64_t is_set_of(int64_t n, Copy* const* copies, const int64_t* slots, const void* const* counters,
                  Object* inputs) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i) {
    const TensorImpl* const weight = input(inputs, slots[i]);
    if (!weight || Counter::of(*weight) != counters[i] || !copies[i]->is_of(*weight)) return false;
    if (!copies[i]->memory->trainable && weight->requires_grad()) copies[i]->memory->set_trainable();
  }
  return true;
}); }

// For a graph that reads them.
Object* buffers_of(int64_t n, Copy* const* copies) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i) copies[i]->unread_updates = 0;
  return list_of(n, copies);
}); }

// These storages are updated. What no graph has read for `kUnread` updates is let go: packed for an evaluation, for one.
void note_updated(int64_t n, const void* const* storages) { return guarded([&] {
  std::vector<Ptr<Copy>> unread;  // held: Python's code may run as buffers are freed
  for (int64_t i = 0; i < n; ++i)
    if (const auto m = Memory::all.find(storages[i]); m != Memory::all.end())
      for (Copy* c : m->second->copies)
        if (c->buffer && !c->fixed && ++c->unread_updates > kUnread) unread.push_back(hold(c));
  for (auto& c : unread) put(c.get(), none);
}); }

// The list of a set's buffers, if all are fresh, and cast before what this stream launches next; None if the set isn't of
// these weights, else False. With `threads`, others are compared or cast before.
Object* read_copies(int64_t n, Copy* const* copies, const int64_t* slots, const void* const* counters,
                    Object* inputs, const Waited* waited, int64_t stream, int64_t threads) try {
  Object* const no = reinterpret_cast<Object*>(_Py_FalseStruct);
  if (!is_set_of(n, copies, slots, counters, inputs)) return given(none);
  check(copies, n);
  const int64_t now = new_mark();
  std::vector<Copy*> others;
  for (int64_t i = 0; i < n; ++i) {
    Copy* const c = copies[i];
    if (c->status() == kFresh || c->queued == now) continue;
    if (!threads || running || c->memory->step_open || !c->castable || !c->tensor) return given(no);
    c->queued = now, others.push_back(c);
  }
  if (!others.empty()) renew(others, threads);
  for (const Copy* c : others) if (c->status() != kFresh) return given(no);
  if (!in_order(n, copies, stream, waited)) return given(no);
  return buffers_of(n, copies);
} catch (const std::exception&) {
  return given(none);
}

// These copies were written by one launch on this stream.
void note_launch(int64_t n, Copy* const* copies, int64_t stream) { return guarded([&] {
  const int64_t launch = new_mark();
  for (int64_t i = 0; i < n; ++i) copies[i]->launch = launch, copies[i]->stream = stream;
}); }

// This stream has waited for all that was launched for a set.
void note_waited(Waited* waited, int64_t stream) { return guarded([&] {
  std::copy_backward(waited, waited + kStreams - 1, waited + kStreams);
  waited[0] = {stream, new_mark()};
}); }

// Checks, and gives the status of each copy, plus 4 if it can't be overwritten.
void statuses(int64_t n, Copy* const* copies, int64_t* found) { return guarded([&] {
  check(copies, n);
  for (int64_t i = 0; i < n; ++i) found[i] = copies[i]->status() + (copies[i]->writable() ? 0 : 4);
}); }

// Checks castable copies, and does what is possible; gives which have been cast.
void renew_all(int64_t n, Copy* const* copies, int64_t threads, int64_t* cast) { return guarded([&] {
  check(copies, n);
  const int64_t before = new_mark();
  renew({copies, copies + n}, threads);
  for (int64_t i = 0; i < n; ++i) cast[i] = copies[i]->made > before;
}); }

// Around casts by others: until `note_made` the copies are invalid.
void note_begun(int64_t n, Copy* const* copies) {
  return guarded([&] { ++passes; for (int64_t i = 0; i < n; ++i) copies[i]->begin_cast(); });
}
void note_made(int64_t n, Copy* const* copies) {
  return guarded([&] { ask_steps(); for (int64_t i = 0; i < n; ++i) copies[i]->end_cast(); });
}

// Begins the capture of a CUDA graph of a whole step: until `end_capture`, memory is noted that is written.
void begin_capture() { return guarded([&] {
  check(nullptr, 0);
  for (auto& [_, m] : Memory::all) m->check_signals(), m->noted_mark = m->mark, m->noted_maybe_written = m->maybe_written;
  recording = true;
}); }

// Checks, and gives 0 for copies that hold their weights' numbers at this place of the graph: what was written in the
// capture counts only if that has cast it since. Else 2, plus 4 for one that a backward may still read.
void captured_statuses(int64_t n, Copy* const* copies, int64_t* found) { return guarded([&] {
  check(copies, n);
  for (int64_t i = 0; i < n; ++i) {
    const Copy& c = *copies[i];
    const bool fresh = c.status() == kFresh && (!c.memory->written() || c.recorded == c.made);
    found[i] = fresh ? kFresh : kStale + (c.alone() ? 0 : 4);
  }
}); }

// The capture has written these copies.
void note_recorded(int64_t n, Copy* const* copies) {
  return guarded([&] { for (int64_t i = 0; i < n; ++i) copies[i]->recorded = copies[i]->made; });
}

// Gives as many of the storages that were written as there is room for, and if surely; returns how many there are.
int64_t note_written(int64_t room, const void** storages, int64_t* surely) { return guarded([&] {
  int64_t count = 0;
  check(nullptr, 0);
  for (auto& [at, m] : Memory::all) {
    m->check_signals();
    if (!m->written()) continue;
    if (count < room) surely[count] = m->mark != m->noted_mark, storages[count] = at;
    ++count;
  }
  return count;
}); }

void end_capture() { recording = false; }

int64_t now() { return new_mark(); }

// A replayed graph wrote these storages, and perhaps those that are watched `since`; and these copies from their weights.
void note_replayed(int64_t count, const void* const* storages, const int64_t* surely, int64_t since, int64_t n,
                   Copy* const* copies) { return guarded([&] {
  for (int64_t i = 0; i < count; ++i) if (surely[i]) note_updated(1, storages + i);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = Memory::all.find(storages[i]);
    if (found == Memory::all.end()) continue;
    Memory& m = *found->second;
    (surely[i] ? m.mark : m.maybe_written) = new_mark();
    if (surely[i]) for (Counter& each : m.counters) each.version.bump();  // for a backward that is still to come
  }
  for (auto& [_, m] : Memory::all) if (m->born > since) m->mark = new_mark();
  check(copies, n);
  for (int64_t i = 0; i < n; ++i) {
    if (copies[i]->tensor) copies[i]->tensor->bump_version();
    copies[i]->begin_cast(), copies[i]->end_cast();
  }
}); }

// Where tensors lie, and if they require gradients.
static int64_t place_of(const TensorImpl* tensor) {
  if (!tensor || !tensor->has_storage() || !tensor->unsafe_storage()) return -1;
  return reinterpret_cast<int64_t>(address_of(*tensor)) << 1 | tensor->requires_grad();
}
void note_places(int64_t n, int64_t* places, Object* tensors) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i) places[i] = place_of(input(tensors, i));
}); }
int64_t are_at(int64_t n, const int64_t* places, Object* tensors) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i) if (place_of(input(tensors, i)) != places[i]) return false;
  return true;
}); }

// Another form of the weight, with the same sample, holds the same numbers as the one that it was made of.
void note_made_of(Copy* copy, const Copy* of) { return guarded([&] {
  copy->mark = of->mark, copy->maybe_written = of->maybe_written, copy->sampled = of->sampled;
}); }

void mark_maybe_written(Copy* copy) { copy->maybe_written = 0; }  // this one alone is doubtful now
int64_t count_passes() { return passes; }

// Reports about storages: 0: surely written, 1: if it is trainable, 2: perhaps.
void report(int64_t n, const void* const* storages, int64_t what) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i)
    if (const auto m = Memory::all.find(storages[i]); m != Memory::all.end() && (what != 1 || m->second->trainable))
      (what == 2 ? m->second->maybe_written : m->second->mark) = new_mark();
}); }

// Begins a step that writes these weights, all of them, before it is among `steps`: gives the list of the copies that it may
// write, which are invalid until `close_step`, and their weights' indices. Nothing on these storages is fresh until then.
// Kernels write rounded numbers of at most 16 bits; in 32 bits, for CPUs that multiply those, only what is castable.
Object* open_step(Object* params, int64_t n, int64_t* indices, Copy** borrowed, int64_t room) { return guarded([&] {
  int64_t found = 0;
  std::vector<const void*> updated;  // each once: two weights may lie in one
  for (int64_t i = 0; i < n; ++i) if (const Memory* const m = Memory::of(input(params, i))) updated.push_back(m->at);
  std::sort(updated.begin(), updated.end());
  note_updated(std::unique(updated.begin(), updated.end()) - updated.begin(), updated.data());
  for (int64_t i = 0; i < n; ++i) {
    const TensorImpl* const weight = input(params, i);
    Memory* const m = Memory::of(weight);
    if (m && m->step_open) {  // a step that failed may have written unseen, one that runs may write what it was lent
      m->mark = new_mark(), m->step_open = false;
      for (Copy* c : m->copies) c->borrowed_by_optimizer = false;
    }
    for (Copy* c : m ? m->copies : std::vector<Copy*>()) {
      if (found == room || !c->is_of(*weight) || !c->tensor || (c->tensor->itemsize() > 2 && !c->castable)) continue;
      check(&c, 1);
      if (c->status() == kFresh && (recording ? c->alone() : c->writable())) indices[found] = i, borrowed[found++] = c;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    Memory* const m = Memory::of(input(params, i));
    if (!m) continue;
    m->step_open = true, m->mark_at_open = m->mark;
    for (Counter& each : m->counters) each.at_open = each.version.current_version();
  }
  for (int64_t i = 0; i < found; ++i) borrowed[i]->mark = 0, borrowed[i]->borrowed_by_optimizer = true;
  return list_of(found, borrowed);
}); }

// Ends it: the borrowed copies hold the weights' new values, unless others wrote as well. The step has raised each weight's
// version once: if it rose further, another thread wrote meanwhile; or a check or a report noticed that, which left a new
// mark. Other writes show at the next check.
void close_step(Object* params, int64_t n, Copy* const* borrowed, int64_t found) { return guarded([&] {
  for (int64_t i = 0; i < n; ++i) {
    const TensorImpl* const weight = input(params, i);
    Memory* const m = Memory::of(weight);
    if (!m) continue;
    bool others_wrote = m->step_open && m->mark != m->mark_at_open;  // of two weights in one memory, the first ends it
    for (Counter& each : m->counters) {
      if (each.key() != Counter::of(*weight)) continue;
      each.take_change();
      others_wrote |= each.seen > each.at_open + 1;
    }
    if (others_wrote) for (Copy* c : m->copies) c->borrowed_by_optimizer = false;
    m->step_open = false, m->mark = new_mark();
  }
  for (Copy* c : std::vector<Copy*>(borrowed, borrowed + found)) {
    c->compare_sample();  // reads the sample anew, as what was borrowed has no mark: another's write shows at the next check
    if (c->borrowed_by_optimizer) c->mark = c->memory->mark, c->made = new_mark(), c->borrowed_by_optimizer = false;
  }
}); }
}

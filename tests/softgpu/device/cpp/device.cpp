// A device "cuda" made of the CPU: what is registered with PyTorch, and what Python asks for.
// Loaded before torch is imported, which looks for hooks once.
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

#include "hooks.h"

namespace softgpu {
namespace {

/** Runs something with a device as the current one. */
struct On {
  c10::DeviceIndex before = current_device;
  explicit On(std::optional<at::Device> device) {
    if (device) current_device = checked(*device);
  }
  ~On() { current_device = before; }
};

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.empty() && !size.empty()) {
    strides.assign(size.size(), 1);
    for (int64_t i = int64_t(size.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

Tensor& set_storage_offset(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return set_storage(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_source(Tensor& self, Storage source) {
  int64_t n = int64_t(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {n}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  On on(self.device());
  return set_storage(self, storage_of(0, allocator()->allocate(0), allocator()), 0, {0}, {1});
}

void record_stream(Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

}  // namespace
}  // namespace softgpu

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&softgpu::by_cpu>()); }

namespace softgpu {
namespace {
/** Registers ops, once torch is there: a build for CUDA has a guard by then, and kernels, of which each is replaced. */
void take_over(bool replace) {
  static auto* m = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto by_boxed = [](const std::string& name) { m->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); };
  if (replace)
    for (auto& op : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA))
      if (op.name.rfind("aten::", 0) == 0) by_boxed(c10::toString(op));
  // What is written for all devices, but asks for a kernel by the device's type; and of what is written in other ops for
  // all devices, as which tracing would see it too, that for which a GPU has a kernel.
  for (const char* name : {"copy_", "convolution", "convolution_backward", "silu_backward", "mish_backward", "addr", "addr.out",
                           "all.dims", "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "native_layer_norm",
                           "native_group_norm"})
    by_boxed(name);
  m->impl("empty.memory_format", &empty);
  m->impl("empty_strided", &empty_strided);
  m->impl("set_.source_Storage", &set_source);
  m->impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m->impl("set_.source_Tensor", &set_tensor);
  m->impl("set_", &set_nothing);
  m->impl("record_stream", &record_stream);
  c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());
  c10::SetAllocator(c10::DeviceType::CUDA, allocator(), 255);
}
}  // namespace
}  // namespace softgpu

namespace at {
using CUDAHooks = softgpu::Hooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

namespace native {
namespace {
/** Flash attention for what it can do, plain math for all else. */
int64_t pick_attention(const Tensor& q, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double dropout, bool,
                       std::optional<double>, bool) {
  bool flash = !mask && dropout == 0 && (q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16);
  return int64_t(flash ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}
}  // namespace
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &pick_attention)
}  // namespace native
}  // namespace at

namespace {
thread_local std::string failure;

/** Runs a call of Python's; -1 says that `soft_failure` has a message. */
template <class F>
int64_t tried(F call) {
  try {
    return int64_t(call());
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  return -1;
}

int64_t text_of(const std::string& all, char* text, int64_t room) {
  if (int64_t(all.size()) < room) std::copy(all.c_str(), all.c_str() + all.size() + 1, text);
  return int64_t(all.size());
}
}  // namespace

using namespace softgpu;

extern "C" {
const char* soft_failure() { return failure.c_str(); }

// Memory.
int64_t soft_blocks(uint64_t* where, uint64_t* size, int64_t room) {
  Held held(lock());
  int64_t i = 0;
  for (auto& [at, block] : memory().blocks)
    if (i < room) where[i] = at, size[i] = block->size, ++i;
  return int64_t(memory().blocks.size());
}
int64_t soft_allocated(int device, int what) { return what ? memory().peak[device] : memory().allocated[device]; }
void soft_reset_peak(int device) { memory().peak[device] = memory().allocated[device]; }
void soft_pool(int64_t pool) {
  Held held(lock());
  graphs().pooling = pool;
  if (pool >= 0) ++graphs().pools[pool].users;
}
void soft_release_pool(int64_t pool) { leave_pool(pool); }
void soft_take_away(c10::StorageImpl* storage, const char* message) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

// Devices and streams.
int64_t soft_take_over(int replace) { return tried([=] { take_over(replace); return 0; }); }
void soft_hand_out_default(int on) { hand_out_default = on; }
int64_t soft_device(int64_t device) {
  auto before = current_device;
  if (device >= DEVICES) return tried([&] { return checked(cuda(c10::DeviceIndex(device))); });
  if (device >= 0) current_device = c10::DeviceIndex(device);
  return before;
}
int64_t soft_stream(int64_t device) { return stream_of(current_stream(c10::DeviceIndex(device))).id(); }
void soft_set_stream(int64_t id, int64_t device) {
  current_device = c10::DeviceIndex(device);
  current_streams[device] = id ? int(id) : int(device);
}
int64_t soft_new_stream(int64_t device) { return streams().add(c10::DeviceIndex(device)); }
int soft_sync_mode(int mode) {
  if (mode >= 0) sync_mode = mode;
  return sync_mode;
}
int64_t soft_synchronize(int64_t device) {
  return tried([&] { Guard().synchronizeDevice(c10::DeviceIndex(device)); return 0; });
}

// A kernel's launch: `soft_launch`, then what it touched; `soft_record` has a capture repeat it.
int64_t soft_launch(int64_t device, const char* name) {
  Held held(lock());
  if (noting) noted().push_back(name);
  int stream = current_stream(c10::DeviceIndex(device));
  if (captures(stream)) save_all();
  return int64_t(streams().launch(stream));
}
int64_t soft_touch(int64_t device, int64_t launch, const char* name, int64_t n, const uint64_t* where, const uint64_t* size, const uint8_t* write) {
  return tried([&] {
    Held held(lock());
    int stream = current_stream(c10::DeviceIndex(device));
    std::vector<Use> uses;
    for (int64_t i = 0; i < n; ++i)
      if (auto block = block_at(reinterpret_cast<void*>(where[i])); block && block->device >= 0) {
        TORCH_CHECK(block->device == device, "CUDA error: an illegal memory access was encountered: ", name, " on cuda:", device,
                    " touches memory of cuda:", int(block->device));
        size_t begin = where[i] - uintptr_t(block->data);
        uses.push_back({block, {begin, begin + size[i]}, bool(write[i])});
      }
    touch(uses, stream, uint64_t(launch), name, captures(stream));
    after_writing(uses, captures(stream));
    if (captures(stream)) capture()->graph->steps.back().uses = std::move(uses);
    return 0;
  });
}
int soft_record(int64_t device, const char* name, void (*call)(int64_t), int64_t id) {
  if (!captures(current_stream(c10::DeviceIndex(device)))) return 0;
  capture()->graph->steps.push_back({name, [call, id] { call(id); }, {}});
  return 1;
}

// CUDA graphs.
int soft_capturing() { return captures(current_stream(current_device)); }
int64_t soft_begin(int64_t pool) { return tried([&] { begin_capture(current_stream(current_device), pool); return 0; }); }
int64_t soft_end() { return tried([] { return end_capture(); }); }
int64_t soft_replay(int64_t id) { return tried([&] { replay(id, current_stream(current_device)); return 0; }); }
void soft_forget(int64_t id) {
  Held held(lock());
  graphs().all.erase(id);
}

// Names of the ops and kernels that ran since this was switched on, one a line.
void soft_note(int on) {
  Held held(lock());
  noting = on;
  if (on) noted().clear();
}
int64_t soft_notes(char* text, int64_t room) {
  Held held(lock());
  std::string all;
  for (auto& each : noted()) all += each + "\n";
  return text_of(all, text, room);
}
}

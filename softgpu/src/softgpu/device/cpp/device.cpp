// A device "cuda" made of the CPU: what is registered with PyTorch, and what Python asks for.
// Loaded before torch is imported, which looks for hooks once.
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

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

using namespace softgpu;
using Index = c10::DeviceIndex;

PYBIND11_MODULE(softgpu, m) {
  pybind11::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const c10::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    }
  });

  // Memory.
  m.def("blocks", [] {
    Held held(lock());
    std::vector<std::pair<uintptr_t, size_t>> found;
    for (auto& [at, block] : memory().blocks)
      if (!replays || !block->segment) found.emplace_back(at, block->size);
    if (replays)
      for (auto& [at, segment] : memory().segments) found.emplace_back(at, segment->size);
    return found;
  });
  m.def("counts", [](Index device) {
    Held held(lock());
    std::vector<std::vector<std::array<int64_t, 4>>> found(WHATS);
    for (int what = 0; what < WHATS; ++what)
      for (auto& kind : memory().counts[device])
        found[what].push_back({kind[what].current, kind[what].peak, kind[what].allocated, kind[what].freed});
    return found;
  });
  m.def("reset", [](Index device, bool peaks) {
    Held held(lock());
    for (auto& kind : memory().counts[device])
      for (auto& each : kind) peaks ? each.peak = each.current : each.allocated = each.freed = 0;
  });
  // Segments: address, size, device, stream, pool (0: none); and their blocks: address, size, bytes asked for, state.
  m.def("segments", [] {
    Held held(lock());
    using Row = std::tuple<uintptr_t, size_t, size_t, const char*>;
    std::vector<std::tuple<uintptr_t, size_t, int, int64_t, int64_t, std::vector<Row>>> found;
    for (auto& [at, segment] : memory().segments) {
      std::vector<Row> rows;
      for (auto& [begin, end] : segment->free) rows.emplace_back(begin, end - begin, 0, "inactive");
      for (auto& part : segment->late) rows.emplace_back(part.begin, part.end - part.begin, 0, "active_pending_free");
      for (auto block = memory().blocks.lower_bound(at); block != memory().blocks.end() && block->first < at + segment->size; ++block)
        rows.emplace_back(block->first, rounded(block->second->size), block->second->size, "active_allocated");
      std::sort(rows.begin(), rows.end());
      found.emplace_back(at, segment->size, segment->device, stream_of(segment->stream).id(), segment->pool, rows);
    }
    for (auto& [at, block] : memory().blocks)
      if (block->device >= 0 && !block->segment)
        found.emplace_back(at, rounded(block->size), block->device, stream_of(block->stream).id(), 0,
                           std::vector<Row>{{at, rounded(block->size), block->size, "active_allocated"}});
    return found;
  });
  m.def("pool", [](int64_t pool) {
    Held held(lock());
    graphs().pooling = pool;
    if (pool < 0) return;
    ++graphs().pools[pool].users;
    graphs().pools[pool].reuses = false;
  });
  m.def("release_pool", &leave_pool);
  m.def("take_away", [](uintptr_t storage, const std::string& message) {
    reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  });

  // Devices and streams.
  m.def("take_over", &take_over);
  m.def("hand_out_default", [](bool on) { hand_out_default = on; });
  m.def("device", [] { return current_device; });
  m.def("exchange_device", [](Index device) { return Guard().exchangeDevice(cuda(device)).index(); });
  m.def("stream", [](Index device) { return stream_of(current_stream(device)).id(); });
  m.def("set_stream", [](int id, Index device) {
    current_device = device;
    current_streams[device] = id ? id : device;
  });
  m.def("new_stream", [](Index device) { return streams().add(device); });
  m.def("sync_mode", [] { return sync_mode; });
  m.def("set_sync_mode", [](int mode) { sync_mode = mode; });
  m.def("synchronize", [] { Guard().synchronizeDevice(current_device); });

  // A kernel's launch: `launch`, then what it touched; `record` has a capture repeat it.
  m.def("launch", [](Index device, const std::string& name) {
    Held held(lock());
    if (noting) noted().push_back(name);
    int stream = current_stream(device);
    if (captures(stream)) save_all();
    return streams().launch(stream);
  });
  m.def("record", [](Index device, const std::string& name, std::function<void()> call) {
    if (captures(current_stream(device))) capture()->graph->steps.push_back({name, std::move(call), {}});
  });
  m.def("touch", [](Index device, uint64_t launch, const std::string& name,
                    const std::vector<std::tuple<uintptr_t, size_t, bool>>& touched) {
    Held held(lock());
    int stream = current_stream(device);
    std::vector<Use> uses;
    for (auto& [where, size, write] : touched)
      if (auto block = block_at(reinterpret_cast<void*>(where)); block && block->device >= 0) {
        TORCH_CHECK(block->device == device, "CUDA error: an illegal memory access was encountered: ", name, " on cuda:",
                    int(device), " touches memory of cuda:", int(block->device));
        uses.push_back(use(block, {where, where + size}, write));
      }
    touch(uses, stream, launch, name, captures(stream));
    after_writing(uses, captures(stream));
    if (captures(stream)) capture()->graph->steps.back().uses = std::move(uses);
  });

  // CUDA graphs.
  m.def("capturing", [] { return captures(current_stream(current_device)); });
  m.def("begin", [](int64_t pool) { begin_capture(current_stream(current_device), pool); });
  m.def("end", &end_capture);
  m.def("replay", [](int64_t id) { replay(id, current_stream(current_device)); });
  m.def("forget", [](int64_t id) {
    Held held(lock());
    graphs().all.erase(id);
  });

  // Names of the ops and kernels that ran since this was switched on.
  m.def("note", [](bool on) {
    Held held(lock());
    if (on) noted().clear();
    noting = on;
    return noted();
  });
}

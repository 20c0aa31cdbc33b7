// Any op, by the CPU's kernel: one boxed fallback for the dispatch key CUDA.
#pragma once
#include <torch/library.h>

#include "call.h"

namespace softgpu {

using Stack = torch::jit::Stack;

inline int sync_mode = 0;
inline bool noting = false;
inline auto& noted() {  // names of what ran, for a profile
  static auto* it = new std::vector<std::string>;
  return *it;
}

/** What makes the host wait: an error in a capture, and as torch.cuda.set_sync_debug_mode says. */
inline void waits(const std::string& what, int stream) {
  TORCH_CHECK(!captures(stream), "CUDA error: operation not permitted when stream is capturing (", what, ")");
  TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
}

struct OnTheCpu {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/** Softmax from 16 bits to float32 and back is one op on a GPU, and none on a CPU. */
inline bool run_softmax(const std::string& name, Stack* stack, size_t given) {
  auto args = stack->end() - int64_t(given);
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && given == 3 && args[2].toBool()) {
    args[0] = args[0].toTensor().to(at::kFloat);
    args[2] = false;
  } else if ((name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") && given == 5 &&
             args[3].toScalarType() != args[0].toTensor().scalar_type()) {
    auto grad = args[0].toTensor(), result = args[1].toTensor(), out = args[4].toTensor();
    auto backward = name == "aten::_softmax_backward_data" ? &at::_softmax_backward_data : &at::_log_softmax_backward_data;
    auto wide = (*backward)(grad, result, args[2].toInt(), grad.scalar_type());
    out.resize_(wide.sizes()).copy_(wide);
    torch::jit::drop(*stack, given);
    stack->emplace_back(out);
    return true;
  }
  return false;
}

/** oneDNN reads what lies between rows of bfloat16, and 0 times NaN is NaN: products get operands without gaps. */
inline void close_gaps(const c10::FunctionSchema& schema, Stack* stack) {
  static const std::set<std::string> PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  if (!PRODUCTS.count(schema.name())) return;
  auto value = stack->end() - int64_t(schema.arguments().size());
  for (auto& argument : schema.arguments()) {
    if (value->isTensor() && !argument.alias_info() && !value->toTensor().is_non_overlapping_and_dense())
      *value = value->toTensor().contiguous();
    ++value;
  }
}

/** What takes no generator, as dropout, draws from the CPU's: the device's numbers stand there meanwhile. */
struct Draws {
  at::Generator host = at::detail::getDefaultCPUGenerator(), device;
  Tensor before;
  explicit Draws(c10::DeviceIndex index) : device(default_generator(index)), before(host.get_state()) {
    host.set_state(device.get_state());
  }
  ~Draws() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

inline bool draws(const c10::OperatorHandle& op) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const auto& arguments = op.schema().arguments();
  return std::none_of(arguments.begin(), arguments.end(), [](auto& each) { return each.name() == "generator"; });
}

inline void run(const c10::OperatorHandle& op, Stack* stack, c10::DeviceIndex device) {
  OnTheCpu guard;
  std::optional<Draws> numbers;
  if (draws(op)) numbers.emplace(device);
  const auto& schema = op.schema();
  close_gaps(schema, stack);
  if (!run_softmax(schema.name(), stack, schema.arguments().size()))
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

inline void copy_into(const c10::IValue& to, const c10::IValue& from) {
  if (to.isTensor() && to.toTensor().defined()) {
    OnTheCpu guard;
    to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    auto a = to.toTensorVector(), b = from.toTensorVector();
    for (size_t i = 0; i < a.size(); ++i) copy_into(a[i], b[i]);
  }
}

template <class F>
void each_tensor(const c10::IValue& value, F act) {
  if (value.isTensor() && value.toTensor().defined()) {
    act(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) each_tensor(each, act);
  }
}

inline Range bytes_of(const Tensor& tensor) {
  size_t begin = uintptr_t(tensor.data_ptr()), last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

inline const std::set<std::string> WAIT = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::nonzero.out", "aten::masked_select",
    "aten::masked_select.out", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::repeat_interleave.Tensor"};
// What takes the CPU's tensors beside the device's, other than numbers.
inline const std::set<std::string> MIXED = {
    "aten::copy_", "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::_foreach_copy_", "aten::_fused_sgd_", "aten::_fused_adam_", "aten::_fused_adamw_",
    "aten::_foreach_addcdiv_.Tensor", "aten::_foreach_addcmul_.Tensor", "aten::_foreach_addcdiv.Tensor",
    "aten::_foreach_addcmul.Tensor"};

/** Whether the host waits for this op on a GPU. */
inline bool makes_wait(const std::string& name, at::ArrayRef<c10::IValue> args) {
  if (WAIT.count(name)) return true;
  if (name == "aten::copy_") {
    auto to = args[0].toTensor(), from = args[1].toTensor();
    return to.device().type() != from.device().type() && !args[2].toBool();
  }
  bool masked = false;  // an index that is a mask is made one of numbers first
  if (name.find("aten::index") == 0 && args.size() > 1)
    if (name.find("index.Tensor") != std::string::npos || name.find("index_put") != std::string::npos)
      each_tensor(args[1], [&](const Tensor& t) { masked |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
  return masked;
}

/** The device of an op: that of its tensors, which must agree, or the one asked for. */
inline c10::DeviceIndex device_of(const std::string& name, at::ArrayRef<c10::IValue> args) {
  c10::DeviceIndex found = -1, asked = -1;
  bool mixed = MIXED.count(name), host = false;
  for (auto& each : args) {
    if (each.isDevice() && each.toDevice().is_cuda()) asked = each.toDevice().index();
    each_tensor(each, [&](const Tensor& tensor) {
      if (tensor.is_cuda()) {
        TORCH_CHECK(found < 0 || mixed || found == tensor.device().index(), "Expected all tensors to be on the same device, but ",
                    name, " got cuda:", int(found), " and ", tensor.device());
        if (found < 0) found = tensor.device().index();
      } else {
        host |= tensor.dim() > 0;
      }
    });
  }
  TORCH_CHECK(mixed || found < 0 || !host, "Expected all tensors to be on the same device, but ", name, " got cuda:",
              int(found), " and cpu");
  return found >= 0 ? found : asked >= 0 ? asked : current_device;
}

/** What an op reads and writes; a view does neither. */
inline std::vector<Use> uses_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> args) {
  for (auto& each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return {};
  std::vector<Use> found;
  const bool norm = schema.name() == "aten::native_batch_norm";  // its schema doesn't say what training writes
  for (size_t i = 0; i < args.size(); ++i) {
    auto& argument = schema.arguments()[i];
    const bool write = norm ? argument.name().rfind("running_", 0) == 0 && args[5].toBool()
                            : argument.alias_info() && argument.alias_info()->isWrite();
    each_tensor(args[i], [&](const Tensor& tensor) {
      if (!tensor.is_cuda() || !tensor.numel()) return;
      if (auto block = block_at(tensor.data_ptr())) found.push_back(use(block, bytes_of(tensor), write));
    });
  }
  return found;
}

/** A launch of whatever kind: who comes before whom. */
inline void touch(const std::vector<Use>& uses, int stream, uint64_t launch, const std::string& who, bool captured) {
  for (auto& each : uses) each.history->touch(each.range, each.write, stream, launch, who, captured ? memory().capture : 0);
}

/** What a capture that goes on must put back, before and after a launch writes. */
inline void before_writing(const std::vector<Use>& uses, bool captured) {
  if (!captured) return;
  for (auto& use : uses)
    if (auto block = use.block.lock(); block && use.write) save(*block);
}

inline void after_writing(const std::vector<Use>& uses, bool captured) {
  if (captured || !capture()) return;
  for (auto& use : uses)
    if (auto block = use.block.lock(); block && use.write)
      if (auto found = capture()->before.find(uintptr_t(block->data)); found != capture()->before.end())
        found->second.assign(static_cast<char*>(block->data), block->size);
}

inline void by_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  auto given = schema.arguments().size(), begin = stack->size() - given;
  const auto name = c10::toString(op.operator_name());
  at::ArrayRef<c10::IValue> operands(stack->data() + begin, given);
  auto device = device_of(name, operands);
  int stream = current_stream(device);
  bool wait = makes_wait(name, operands), captured = captures(stream);
  if (wait) waits(name, stream);
  auto uses = uses_of(schema, operands);
  uint64_t launch;
  {
    Held held(lock());
    if (name == "aten::copy_" && operands[1].toTensor().is_cuda() && operands[0].toTensor().is_cuda()) {
      // From one device to another: both streams wait for each other.
      int other = current_stream(operands[1].toTensor().device().index());
      streams().clocks[stream].join(streams().clocks[other]);
      launch = streams().launch(stream);
      if (other != stream) streams().clocks[other].join(streams().clocks[stream]);
    } else {
      launch = streams().launch(stream);
    }
  }
  touch(uses, stream, launch, name, captured);
  before_writing(uses, captured);
  Call call(device, captured);
  for (size_t i = 0; i < given; ++i) {
    auto& value = (*stack)[begin + i];
    const auto& type = schema.arguments()[i].type();
    bool generator = type->kind() == c10::TypeKind::GeneratorType ||
        (type->kind() == c10::TypeKind::OptionalType &&
         type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (generator && value.isNone()) value = cpu_generator(default_generator(device));
    value = call.to_cpu(value);
  }
  std::vector<c10::IValue> args;
  if (captured) args.assign(stack->begin() + begin, stack->end());
  run(op, stack, device);
  auto outs = schema.returns().size(), first = stack->size() - outs;
  std::vector<c10::IValue> results(stack->begin() + first, stack->end());
  for (size_t i = 0; i < outs; ++i) (*stack)[first + i] = call.from_cpu((*stack)[first + i]);
  call.write_back();
  after_writing(uses, captured);
  bool writes = !call.made.empty();
  for (auto& use : uses) writes |= use.write;
  for (auto& block : call.made) {
    uses.push_back(use(block, block->range(), true));
    touch({uses.back()}, stream, launch, name, captured);
  }
  if (wait) streams().host_waits_for(stream);
  if (!writes) return;
  Held held(lock());
  if (noting) noted().push_back(name);
  if (captured)
    capture()->graph->steps.push_back({name, [op, args, results, device, own = !call.made.empty()] {
      Stack again(args.begin(), args.end());
      run(op, &again, device);
      if (own)
        for (size_t i = 0; i < results.size(); ++i) copy_into(results[i], again[again.size() - results.size() + i]);
    }, uses});
}

}  // namespace softgpu

// The operands of one op as the CPU's kernel gets them: tensors that stand for the same memory.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "generator.h"
#include "graphs.h"

namespace softgpu {

using at::Tensor;
using c10::Storage;

inline Storage storage_of(size_t size, c10::DataPtr data, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(data), allocator, true);
}

inline Tensor over(const Storage& storage, const Tensor& like, c10::DispatchKey key) {
  auto found = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = found.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return found;
}

c10::Allocator* allocator();

class Call {
 public:
  Call(c10::DeviceIndex device, bool captured) : device(device), captured(captured) {}

  c10::IValue to_cpu(const c10::IValue& value) {
    if (value.isTensor()) return to_cpu(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& each : value.toTensorList()) found.push_back(to_cpu(each));
      return found;
    }
    if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
      auto list = value.toList();
      auto found = c10::impl::GenericList(list.elementType());
      for (const c10::IValue& each : list) found.push_back(to_cpu(each));
      return found;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return kCPU;
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) return cpu_generator(value.toGenerator());
    return value;
  }

  c10::IValue from_cpu(const c10::IValue& value) {
    if (value.isTensor()) return from_cpu(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> found;
    for (const Tensor& each : value.toTensorList()) found.push_back(from_cpu(each));
    return found;
  }

  /** Give tensors the shape and the memory that the kernel gave those that stand for them. */
  void write_back() {
    for (auto& [ours, cpu] : storages) {
      auto* impl = cpu.unsafeGetStorageImpl();
      if (impl->data_ptr().get() != ours->data_ptr().get()) ours->set_data_ptr_noswap(pointer(adopt(impl), cuda(device)));
      if (impl->nbytes() != ours->nbytes()) ours->set_nbytes(impl->nbytes());
    }
    for (auto& [ours, cpu] : tensors)
      if (ours.sizes() != cpu.sizes() || ours.strides() != cpu.strides() || ours.storage_offset() != cpu.storage_offset())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }

  std::vector<BlockPtr> made;  // memory that the kernel allocated

 private:
  c10::DeviceIndex device;
  bool captured;
  std::vector<std::pair<c10::StorageImpl*, Storage>> storages;  // ours, and the CPU's that stands for it
  std::vector<std::pair<Tensor, Tensor>> tensors;
  std::vector<Storage> kept;

  Storage standing_for(const Storage& storage) {
    auto* impl = storage.unsafeGetStorageImpl();
    for (auto& [ours, cpu] : storages)
      if (ours == impl) return cpu;
    auto* data = impl->data_ptr().get();
    auto block = captured ? nullptr : block_at(data);  // what a graph holds keeps no memory alive
    c10::DataPtr same = block ? c10::DataPtr(data, new BlockPtr(block), &drop, kCPU) : c10::DataPtr(data, kCPU);
    storages.emplace_back(impl, storage_of(impl->nbytes(), std::move(same), c10::GetCPUAllocator()));
    kept.push_back(storage);
    return storages.back().second;
  }

  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [ours, cpu] : tensors)
      if (ours.is_same(tensor)) return cpu;
    TORCH_CHECK(!tensor.is_cuda() || tensor.layout() == c10::kStrided, "made-up GPU: no tensors of layout ", tensor.layout());
    auto cpu = tensor.is_cuda() ? over(standing_for(tensor.storage()), tensor, c10::DispatchKey::CPU) : tensor;
    tensors.emplace_back(tensor, cpu);
    return cpu;
  }

  /** Memory that a CPU's kernel allocated becomes the device's; the CPU's storage goes on referring to it. */
  BlockPtr adopt(c10::StorageImpl* impl) {
    auto block = allocate(impl->nbytes(), device, impl->set_data_ptr(c10::DataPtr(impl->data_ptr().get(), kCPU)));
    made.push_back(block);
    impl->set_data_ptr_noswap(block->segment ? c10::DataPtr(block->data, kCPU) : pointer(block, kCPU));
    return block;
  }

  Tensor from_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [ours, cpu] : tensors)
      if (cpu.is_same(tensor)) return ours;
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    for (auto& [ours, cpu] : storages)
      if (cpu.unsafeGetStorageImpl() == impl)
        return over(Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(ours)), tensor, c10::DispatchKey::CUDA);
    auto block = adopt(impl);
    auto ours = storage_of(block->size, pointer(block, cuda(device)), allocator());
    storages.emplace_back(ours.unsafeGetStorageImpl(), tensor.storage());
    kept.push_back(ours);
    return over(ours, tensor, c10::DispatchKey::CUDA);
  }
};

}  // namespace softgpu

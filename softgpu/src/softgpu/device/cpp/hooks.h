// What PyTorch asks of a device beside ops: allocators, guards, streams and events, hooks.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "ops.h"

namespace softgpu {

/** Memory of the current device, or pinned memory of the host. */
struct BlockAllocator final : c10::Allocator {
  bool pinned;
  explicit BlockAllocator(bool pinned) : pinned(pinned) {}
  c10::DataPtr allocate(size_t size) override {
    auto block = softgpu::allocate(size, pinned ? -1 : current_device);
    if (size && !pinned) std::memset(block->data, 0xff, size);
    return pointer(block, pinned ? kCPU : cuda(block->device));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

inline BlockAllocator* host_memory() {
  static auto* it = new BlockAllocator(true);
  return it;
}
inline c10::Allocator* allocator() {
  static auto* it = new BlockAllocator(false);
  return it;
}

inline c10::DeviceIndex checked(c10::Device device) {
  TORCH_CHECK(device.index() < DEVICES, "CUDA error: invalid device ordinal");
  return device.index() < 0 ? current_device : device.index();
}

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda(current_device); }
  void setDevice(c10::Device device) const override { current_device = checked(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < DEVICES) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream_of(current_stream(checked(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(checked(device)); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream_of(streams().add(checked(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto& current = current_streams[stream.device_index()];
    auto before = current;
    current = number_of(stream);
    return stream_of(before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    streams().host_waits_for(number_of(stream));
    return true;
  }
  bool isStreamCapturing(const c10::Stream& stream) const { return captures(number_of(stream)); }  // virtual after 2.11
  void synchronizeStream(const c10::Stream& stream) const override {
    waits("synchronize", number_of(stream));
    streams().host_waits_for(number_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    TORCH_CHECK(!capture(), "CUDA error: operation not permitted when stream is capturing (synchronize)");
    streams().host_waits_for_device(device);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Held held(lock());
    if (!*event) *event = new Event();
    int number = number_of(stream);
    auto clock = streams().clocks[number];
    clock.join(streams().host);
    *static_cast<Event*>(*event) = {clock, number, captures(number) ? memory().capture : 0, false, seconds()};
  }
  /** A stream that waits for one of a capture joins it. */
  void block(void* given, const c10::Stream& stream) const override {
    Held held(lock());
    auto* event = static_cast<Event*>(given);
    int number = number_of(stream);
    if (!event || event->stream < 0) return;
    TORCH_CHECK(!captures(number) || event->capture == memory().capture || event->capture,
                "CUDA error: dependency created on uncaptured work in another stream");
    if (event->capture && event->capture == memory().capture) capture()->streams.insert(number);
    streams().clocks[number].join(event->clock);
  }
  /** An event isn't over when it is first asked, and is after that. */
  bool queryEvent(void* given) const override {
    Held held(lock());
    auto* event = static_cast<Event*>(given);
    if (!event || event->stream < 0) return true;
    if (!event->asked) {
      event->asked = true;
      return false;
    }
    streams().host.join(event->clock);
    return true;
  }
  void synchronizeEvent(void* given) const override {
    auto* event = static_cast<Event*>(given);
    if (!event || event->stream < 0) return;
    waits("event.synchronize", event->stream);
    Held held(lock());
    event->asked = true;
    streams().host.join(event->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return std::max(1e3 * (static_cast<Event*>(b)->seconds - static_cast<Event*>(a)->seconds), 1e-6);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Held held(lock());
    if (auto block = block_at(data.get())) block->recorded.insert(number_of(stream));
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) { c10::SetAllocator(c10::DeviceType::CUDA, allocator()); }
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return softgpu::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return softgpu::current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return Guard().exchangeDevice(cuda(device)).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(cuda(device)); }
  int getNumGPUs() const override { return DEVICES; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    if (device < 0) device = softgpu::current_device;
    return hand_out_default ? default_generator(device) : new_generator(device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    auto block = block_at(data);
    return block && block->device >= 0 ? cuda(block->device) : kCPU;
  }
  bool isPinnedPtr(const void* data) const override {
    auto block = block_at(data);
    return block && block->device < 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return host_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

}  // namespace softgpu

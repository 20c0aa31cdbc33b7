// Random numbers: a generator of the CPU's for each device.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include "streams.h"

namespace softgpu {

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  Generator(c10::DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(cuda(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
};

inline at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

inline at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, DEVICES>{new_generator(0), new_generator(1)};
  return (*all)[device < 0 ? current_device : device];
}

inline bool hand_out_default = false;  // to Python, which can ask for new ones only

inline at::Generator cpu_generator(const at::Generator& given) {
  return static_cast<Generator*>(given.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace softgpu

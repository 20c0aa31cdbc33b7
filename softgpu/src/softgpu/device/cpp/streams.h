// Streams, played by clocks. Nothing runs late: a launch is done when it returns. But for each stream is kept whose work
// it has waited for, so that a launch which needs a wait and has none is an error, however a GPU might have run it.
#pragma once
#include <c10/core/Stream.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace softgpu {

constexpr c10::DeviceIndex DEVICES = 2;
const c10::Device kCPU(c10::DeviceType::CPU);

inline c10::Device cuda(c10::DeviceIndex index) { return c10::Device(c10::DeviceType::CUDA, index); }

/** Guards all that is kept here. Never freed, like what it guards: tensors outlive static objects. */
inline std::recursive_mutex& lock() {
  static auto* it = new std::recursive_mutex;
  return *it;
}
using Held = std::lock_guard<std::recursive_mutex>;

/** How many launches of each stream have been waited for. */
struct Clock {
  std::vector<uint64_t> launches;

  uint64_t of(size_t stream) const { return stream < launches.size() ? launches[stream] : 0; }
  uint64_t& at(size_t stream) {
    if (stream >= launches.size()) launches.resize(stream + 1);
    return launches[stream];
  }
  void join(const Clock& other) {
    for (size_t i = 0; i < other.launches.size(); ++i) at(i) = std::max(of(i), other.launches[i]);
  }
};

struct Event {
  Clock clock;
  int stream = -1;
  int64_t capture = 0;  // the capture that it was recorded in
  bool asked = false;
  double seconds = 0;
};

/** All streams by number: the first are the devices' default ones. */
struct Streams {
  std::vector<Clock> clocks = std::vector<Clock>(DEVICES);
  std::vector<c10::DeviceIndex> device;
  Clock host;  // what the host has waited for; any later launch comes after it

  Streams() {
    for (c10::DeviceIndex i = 0; i < DEVICES; ++i) device.push_back(i);
  }

  int add(c10::DeviceIndex on) {
    Held held(lock());
    device.push_back(on);
    clocks.emplace_back();
    return int(clocks.size()) - 1;
  }

  /** Begin a launch on a stream. */
  uint64_t launch(int stream) {
    clocks[stream].join(host);
    return ++clocks[stream].at(stream);
  }

  void host_waits_for(int stream) {
    Held held(lock());
    host.join(clocks[stream]);
  }

  void host_waits_for_device(c10::DeviceIndex on) {
    Held held(lock());
    for (size_t i = 0; i < clocks.size(); ++i)
      if (device[i] == on) host.join(clocks[i]);
  }
};

inline Streams& streams() {
  static auto* it = new Streams;
  return *it;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<int, DEVICES> current_streams = {0, 1};

inline int current_stream(c10::DeviceIndex device) { return current_streams[device]; }

/** PyTorch's number for a stream: default streams are 0 on each device. */
inline c10::Stream stream_of(int number) {
  auto device = streams().device[number];
  return c10::Stream(c10::Stream::UNSAFE, cuda(device), number < DEVICES ? 0 : number);
}

inline int number_of(const c10::Stream& stream) {
  return stream.id() ? int(stream.id()) : int(stream.device_index() < 0 ? current_device : stream.device_index());
}

}  // namespace softgpu

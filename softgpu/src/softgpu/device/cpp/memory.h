// Memory: blocks of the CPU's that stand for a GPU's, filled with NaN when they are handed out. Each knows who read and
// wrote it last, and on which stream.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <memory>
#include <set>

#include "streams.h"

namespace softgpu {

struct Range {
  size_t begin, end;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
  bool covers(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

struct Access {
  Range range;
  bool write;
  int stream;
  uint64_t launch;
  int64_t capture;  // captures run nothing: what they note counts among themselves
  std::string who;
};

/** What was freed while another stream may still have worked on it. */
struct Freed {
  int stream;
  uint64_t launch;
  std::string who;
};

struct Block;
struct Memory {
  std::map<uintptr_t, Block*> blocks;
  std::map<int, std::vector<Freed>> freed;  // by the stream whose next allocation may get it
  std::array<int64_t, DEVICES> allocated{}, peak{};
  int64_t capture = 0;  // the number of the capture that is going on
};

inline Memory& memory() {
  static auto* it = new Memory;
  return *it;
}

struct Block : std::enable_shared_from_this<Block> {
  void* data;
  size_t size;
  c10::DeviceIndex device;  // -1: pinned memory of the host
  int stream;               // that it was allocated on
  c10::DataPtr owner;
  bool pooled = false;  // kept for a graph
  int64_t capture = 0;  // in which it was allocated
  std::vector<Access> accesses;
  std::set<int> recorded;  // by record_stream

  Block(size_t size, c10::DataPtr from, c10::DeviceIndex device)
      : data(from.get()), size(size), device(device), stream(device < 0 ? -1 : current_stream(device)), owner(std::move(from)) {
    Held held(lock());
    if (size) memory().blocks[uintptr_t(data)] = this;
    if (device < 0) return;
    memory().allocated[device] += int64_t(size);
    memory().peak[device] = std::max(memory().peak[device], memory().allocated[device]);
  }

  ~Block() {
    Held held(lock());
    if (size) memory().blocks.erase(uintptr_t(data));
    if (device < 0) return;
    memory().allocated[device] -= int64_t(size);
    if (pooled) return;
    for (auto& each : accesses)
      if (!each.capture && each.stream != stream && !recorded.count(each.stream) &&
          streams().clocks[stream].of(each.stream) < each.launch)
        memory().freed[stream].push_back({each.stream, each.launch, each.who});
  }

  /** Note that a launch reads or writes a part; throws where it should have waited for another one. */
  void touch(Range range, bool write, int by, uint64_t launch, const std::string& who, int64_t capture) {
    Held held(lock());
    range.end = std::min(range.end, size);
    const auto& seen = streams().clocks[by];
    std::vector<Access> kept;
    for (auto& each : accesses) {
      if (each.capture && each.capture != memory().capture) continue;
      bool same = each.capture == capture, ordered = seen.of(each.stream) >= each.launch;
      TORCH_CHECK(!same || ordered || !(write || each.write) || !each.range.meets(range), "made-up GPU: ", who, " on stream ",
                  by, write ? " writes" : " reads", " what ", each.who, each.write ? " writes" : " reads", " on stream ",
                  each.stream, ", and no event makes it wait for that");
      bool over = same && ordered && range.covers(each.range) && (write || !each.write);
      if (!over) kept.push_back(std::move(each));
    }
    kept.push_back({range, write, by, launch, capture, who});
    accesses = std::move(kept);
    if (accesses.size() > 64) merge();
  }

 private:
  /** Many small parts of one stream become one. */
  void merge() {
    std::map<std::tuple<int, bool, int64_t>, Access> merged;
    for (auto& each : accesses) {
      auto [found, is_new] = merged.try_emplace({each.stream, each.write, each.capture}, each);
      auto& all = found->second;
      if (is_new) continue;
      all.range = {std::min(all.range.begin, each.range.begin), std::max(all.range.end, each.range.end)};
      if (all.launch < each.launch) all.launch = each.launch, all.who = each.who;
    }
    accesses.clear();
    for (auto& [_, each] : merged) accesses.push_back(each);
  }
};
using BlockPtr = std::shared_ptr<Block>;

inline void drop(void* context) { delete static_cast<BlockPtr*>(context); }

inline c10::DataPtr pointer(const BlockPtr& block, c10::Device device) {
  return {block->data, new BlockPtr(block), &drop, device};
}

/** The block that an address lies in. */
inline BlockPtr block_at(const void* address) {
  Held held(lock());
  auto after = memory().blocks.upper_bound(uintptr_t(address));
  if (after == memory().blocks.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return uintptr_t(address) < uintptr_t(block->data) + block->size ? block->weak_from_this().lock() : nullptr;
}

/** Throws if memory that a stream's allocations may get is still in use on another one. */
inline void check_freed(int stream) {
  Held held(lock());
  auto waiting = std::move(memory().freed[stream]);
  memory().freed[stream].clear();
  streams().clocks[stream].join(streams().host);
  for (auto& each : waiting)
    TORCH_CHECK(streams().clocks[stream].of(each.stream) >= each.launch, "made-up GPU: memory of stream ", stream,
                " was freed while ", each.who, " used it on stream ", each.stream,
                "; record_stream, or a wait, would keep it from being handed out again");
}

}  // namespace softgpu

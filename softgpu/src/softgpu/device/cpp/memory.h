// Memory: blocks of the CPU's that stand for a GPU's, filled with NaN when they are handed out. Each knows who read and
// wrote it last, and on which stream. What lies in a pool is a part of a segment, which goes on knowing it afterwards.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstdlib>
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

/** One of torch's counts of a device's memory. */
struct Count {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t by) {
    current += by;
    peak = std::max(peak, current);
    (by > 0 ? allocated : freed) += std::abs(by);
  }
};
enum What { ALLOCATIONS, SEGMENTS, ALLOCATED, RESERVED, REQUESTED, WHATS };
enum Kind { ALL, SMALL, LARGE, KINDS };  // torch's allocator keeps small blocks apart

struct Block;
struct Segment;
struct Memory {
  std::map<uintptr_t, Block*> blocks;
  std::map<uintptr_t, Segment*> segments;  // of pools
  std::map<int, std::vector<Freed>> freed;  // by the stream whose next allocation may get it
  Count counts[DEVICES][KINDS][WHATS];
  int64_t capture = 0;  // the number of the capture that is going on
};

inline Memory& memory() {
  static auto* it = new Memory;
  return *it;
}

inline size_t rounded(size_t size) { return (size + 511) / 512 * 512; }

/** Count what comes, or goes (`sign` -1). */
inline void count(c10::DeviceIndex device, size_t whole, int sign, What number, What bytes) {
  for (Kind kind : {ALL, whole > 1 << 20 ? LARGE : SMALL}) {
    memory().counts[device][kind][number].add(sign);
    memory().counts[device][kind][bytes].add(sign * int64_t(whole));
  }
}

/** Who read and wrote which addresses last. */
struct History {
  std::vector<Access> accesses;

  /** Note that a launch reads or writes a part; throws where it should have waited for another one. */
  void touch(Range range, bool write, int by, uint64_t launch, const std::string& who, int64_t capture) {
    Held held(lock());
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

/** A pool's memory, in parts that are handed out again once they are free: on the stream that it belongs to. */
struct Segment : std::enable_shared_from_this<Segment> {
  c10::DataPtr memory_;
  size_t size;
  int64_t pool;
  c10::DeviceIndex device;
  int stream;
  bool reuses;
  std::map<uintptr_t, uintptr_t> free;  // where parts begin, and end
  std::vector<Range> late;              // free once the capture is over, as other streams used them
  std::shared_ptr<History> history = std::make_shared<History>();

  Segment(size_t size, int64_t pool, c10::DeviceIndex device, int stream, bool reuses)
      : memory_(c10::GetCPUAllocator()->allocate(size)), size(size), pool(pool), device(device), stream(stream), reuses(reuses) {
    free[begin()] = begin() + size;
    memory().segments[begin()] = this;
    count(device, size, 1, SEGMENTS, RESERVED);
  }
  ~Segment() {
    Held held(lock());
    memory().segments.erase(begin());
    count(device, size, -1, SEGMENTS, RESERVED);
  }
  uintptr_t begin() const { return uintptr_t(memory_.get()); }

  /** Take the beginning of a free part. */
  Range take(uintptr_t at, size_t whole) {
    auto end = free.at(at);
    free.erase(at);
    if (at + whole < end) free[at + whole] = end;
    return {at, at + whole};
  }
  /** A part is free again, and one with those beside it. */
  void give_back(Range part) {
    auto after = free.lower_bound(part.begin);
    if (after != free.end() && after->first == part.end) part.end = after->second, after = free.erase(after);
    if (after != free.begin() && std::prev(after)->second == part.begin) part.begin = std::prev(after)->first;
    free[part.begin] = part.end;
  }
};

/** What a block in a segment holds of it. */
struct Part {
  std::shared_ptr<Segment> segment;
  Range range;
  bool late = false;
  ~Part() {
    Held held(lock());
    if (!segment->reuses) return;
    if (late && memory().capture) segment->late.push_back(range);
    else segment->give_back(range);
  }
  static void drop(void* part) { delete static_cast<Part*>(part); }
};

struct Block : std::enable_shared_from_this<Block> {
  void* data;
  size_t size;
  c10::DeviceIndex device;  // -1: pinned memory of the host
  int stream;               // that it was allocated on
  c10::DataPtr owner;
  std::shared_ptr<Segment> segment;  // of a pool, or none
  std::shared_ptr<History> history;
  int64_t capture = 0;      // in which it was allocated
  std::set<int> recorded;  // by record_stream

  Block(size_t size, c10::DataPtr from, c10::DeviceIndex device, std::shared_ptr<Segment> segment = nullptr)
      : data(from.get()), size(size), device(device), stream(device < 0 ? -1 : current_stream(device)), owner(std::move(from)),
        segment(std::move(segment)), history(this->segment ? this->segment->history : std::make_shared<History>()) {
    Held held(lock());
    if (size) memory().blocks[uintptr_t(data)] = this;
    count(1);
  }

  ~Block() {
    Held held(lock());
    if (size) memory().blocks.erase(uintptr_t(data));
    count(-1);
    if (device < 0) return;
    if (segment) {
      recorded.erase(stream);
      if (size) static_cast<Part*>(owner.get_context())->late = !recorded.empty();
      return;
    }
    for (auto& each : history->accesses)
      if (!each.capture && each.stream != stream && !recorded.count(each.stream) &&
          streams().clocks[stream].of(each.stream) < each.launch)
        memory().freed[stream].push_back({each.stream, each.launch, each.who});
  }

  Range range() const { return {uintptr_t(data), uintptr_t(data) + size}; }

 private:
  void count(int sign) {
    if (device < 0 || !size) return;
    softgpu::count(device, rounded(size), sign, ALLOCATIONS, ALLOCATED);
    for (Kind kind : {ALL, rounded(size) > 1 << 20 ? LARGE : SMALL}) memory().counts[device][kind][REQUESTED].add(sign * int64_t(size));
    if (!segment) softgpu::count(device, rounded(size), sign, SEGMENTS, RESERVED);
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

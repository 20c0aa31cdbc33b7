// CUDA graphs: a capture records steps and runs nothing, so its end puts memory back; a graph holds addresses, no tensors.
#pragma once
#include <functional>

#include "generator.h"
#include "memory.h"

namespace softgpu {

/** What a launch reads or writes; `own`: in the graph's pool, which it may use when no tensor has it any more. */
struct Use {
  std::weak_ptr<Block> block;
  std::shared_ptr<History> history;
  bool own;
  Range range;
  bool write;
};

struct Step {
  std::string who;
  std::function<void()> run;
  std::vector<Use> uses;
};

struct Graph {
  std::vector<Step> steps;
  int64_t pool;
  ~Graph();
};

/** The capture that goes on, one at a time. */
struct Capture {
  std::shared_ptr<Graph> graph;
  int origin = 0;
  std::set<int> streams;                     // that have joined
  std::map<uintptr_t, std::string> before;   // what was in memory
  std::vector<Range> own;                    // what was handed out
  std::vector<at::Tensor> drawn;              // states of the devices' generators
};

inline std::unique_ptr<Capture>& capture() {
  static auto* it = new std::unique_ptr<Capture>;
  return *it;
}

inline Use use(const BlockPtr& block, Range range, bool write) {
  range.end = std::min(range.end, block->range().end);
  bool own = capture() && block->segment && block->segment->pool == capture()->graph->pool;
  return {block, block->history, own, range, write};
}

/** Memory that graphs share, as long as anybody uses it. */
struct Pool {
  std::vector<std::shared_ptr<Segment>> segments;
  int64_t users = 0;
  std::vector<BlockPtr> blocks;
  bool reuses = true;  // not for torch's trees of graphs, which go back to former states: each block is kept
};

struct Graphs {
  std::map<int64_t, std::shared_ptr<Graph>> all;
  std::map<int64_t, Pool> pools;
  int64_t last = 0, captures = 0, pooling = -1;
};

inline Graphs& graphs() {
  static auto* it = new Graphs;
  return *it;
}

inline void leave_pool(int64_t id) {
  Held held(lock());
  auto found = graphs().pools.find(id);
  if (found == graphs().pools.end() || --found->second.users > 0) return;
  auto freed = std::move(found->second);  // after the entry
  graphs().pools.erase(found);
}

inline Graph::~Graph() { leave_pool(pool); }

inline bool captures(int stream) { return capture() && capture()->streams.count(stream); }

/** The pool that new memory comes from: of the graph that is captured, or that is open; -1 for none. */
inline int64_t pool_of(c10::DeviceIndex device) {
  return captures(current_stream(device)) ? capture()->graph->pool : graphs().pooling;
}

/** Memory of a pool: the smallest free part that is large enough, or a segment of just that size. */
inline BlockPtr allocate_in(int64_t id, size_t size, c10::DeviceIndex device) {
  auto& pool = graphs().pools[id];
  int stream = current_stream(device);
  size_t whole = std::max<size_t>(rounded(size), 512), best = SIZE_MAX;
  std::shared_ptr<Segment> segment;
  uintptr_t at = 0;
  for (auto& each : pool.segments)
    if (each->device == device && each->stream == stream)
      for (auto& [begin, end] : each->free)
        if (end - begin >= whole && end - begin < best) best = end - begin, segment = each, at = begin;
  if (!segment) {
    segment = std::make_shared<Segment>(whole, id, device, stream, pool.reuses);
    pool.segments.push_back(segment);
    at = segment->begin();
  }
  auto range = segment->take(at, whole);
  c10::DataPtr owner(reinterpret_cast<void*>(at), new Part{segment, range}, &Part::drop, kCPU);
  auto block = std::make_shared<Block>(size, std::move(owner), device, segment);
  if (!pool.reuses) pool.blocks.push_back(block);
  if (captures(stream)) {
    capture()->own.push_back(range);
    block->capture = memory().capture;
  }
  return block;
}

/** New memory; `from`: of the CPU's, which becomes the device's, or a pool's with the same numbers. */
inline BlockPtr allocate(size_t size, c10::DeviceIndex device, c10::DataPtr from = {}) {
  Held held(lock());
  auto pool = device < 0 || !size ? -1 : pool_of(device);
  if (pool >= 0) {
    auto block = allocate_in(pool, size, device);
    if (from) std::memcpy(block->data, from.get(), size);
    return block;
  }
  if (device >= 0) check_freed(current_stream(device));
  return std::make_shared<Block>(size, from ? std::move(from) : c10::GetCPUAllocator()->allocate(size), device);
}

inline void save(const Block& block) {
  if (block.capture != memory().capture) capture()->before.try_emplace(uintptr_t(block.data), static_cast<char*>(block.data), block.size);
}

inline void save_all() {
  Held held(lock());
  for (auto& [_, block] : memory().blocks)
    if (block->device >= 0) save(*block);
}

inline void begin_capture(int stream, int64_t pool) {
  Held held(lock());
  TORCH_CHECK(!capture(), "CUDA error: operation not permitted when stream is capturing (capture_begin)");
  TORCH_CHECK(stream >= DEVICES, "CUDA graphs must be captured on a non-default stream");
  capture() = std::make_unique<Capture>();
  capture()->graph = std::make_shared<Graph>();
  capture()->graph->pool = pool;
  ++graphs().pools[pool].users;
  capture()->origin = stream;
  capture()->streams = {stream};
  for (c10::DeviceIndex i = 0; i < DEVICES; ++i) capture()->drawn.push_back(default_generator(i).get_state());
  memory().capture = ++graphs().captures;
}

inline int64_t end_capture() {
  Held held(lock());
  TORCH_CHECK(capture(), "CUDA error: stream is not capturing");
  auto ended = std::move(capture());
  memory().capture = 0;
  for (c10::DeviceIndex i = 0; i < DEVICES; ++i) default_generator(i).set_state(ended->drawn[i]);
  for (auto& [at, bytes] : ended->before)
    if (auto block = block_at(reinterpret_cast<void*>(at)); block && block->size == bytes.size())
      std::memcpy(block->data, bytes.data(), bytes.size());
  for (auto& part : ended->own) std::memset(reinterpret_cast<void*>(part.begin), 0xff, part.end - part.begin);
  for (auto& [_, segment] : memory().segments)
    for (auto& part : std::exchange(segment->late, {})) segment->give_back(part);
  for (int each : ended->streams)
    TORCH_CHECK(streams().clocks[ended->origin].of(each) >= streams().clocks[each].of(each),
                "CUDA error: capturing stream has unjoined work (stream ", each, ")");
  graphs().all[++graphs().last] = ended->graph;
  return graphs().last;
}

inline thread_local bool replays = false;  // then all memory of pools may be touched

inline void replay(int64_t id, int stream) {
  std::shared_ptr<Graph> graph;
  uint64_t launch;
  {
    Held held(lock());
    TORCH_CHECK(!captures(stream), "CUDA error: operation not permitted when stream is capturing (replay)");
    graph = graphs().all.at(id);
    launch = streams().launch(stream);
  }
  struct Replaying {
    Replaying() { replays = true; }
    ~Replaying() { replays = false; }
  } replaying;
  for (auto& step : graph->steps) {
    for (auto& use : step.uses) {
      TORCH_CHECK(use.own || !use.block.expired(), "made-up GPU: a CUDA graph's ", step.who, use.write ? " writes" : " reads",
                  " memory that was freed since the capture (", use.range.end - use.range.begin, " bytes)");
      use.history->touch(use.range, use.write, stream, launch, "a CUDA graph's " + step.who, 0);
    }
    step.run();
  }
}

}  // namespace softgpu

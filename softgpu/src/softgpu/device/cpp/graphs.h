// CUDA graphs: a capture records steps and runs nothing, so its end puts memory back; a graph holds addresses, no tensors.
#pragma once
#include <functional>

#include "generator.h"
#include "memory.h"

namespace softgpu {

struct Use {
  std::weak_ptr<Block> block;
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
  std::vector<BlockPtr> own;
  int64_t pool;
  ~Graph();
};

/** The capture that goes on, one at a time. */
struct Capture {
  std::shared_ptr<Graph> graph;
  int origin = 0;
  std::set<int> streams;                     // that have joined
  std::map<uintptr_t, std::string> before;   // what was in memory
  std::vector<at::Tensor> drawn;              // states of the devices' generators
};

inline std::unique_ptr<Capture>& capture() {
  static auto* it = new std::unique_ptr<Capture>;
  return *it;
}

/** Memory that graphs share, and torch's trees of graphs take addresses in for theirs, as long as anybody uses it. */
struct Pool {
  std::vector<BlockPtr> blocks;
  int64_t users = 0;
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

/** New memory belongs to the graph that is captured, or to the pool that is open. */
inline void keep(const BlockPtr& block) {
  Held held(lock());
  if (block->device < 0) return;
  if (captures(block->stream)) {
    capture()->graph->own.push_back(block);
    block->pooled = true;
    block->capture = memory().capture;
  } else if (graphs().pooling >= 0) {
    graphs().pools[graphs().pooling].blocks.push_back(block);
    block->pooled = true;
  } else {
    check_freed(block->stream);
  }
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
  for (auto& block : ended->graph->own) std::memset(block->data, 0xff, block->size);
  for (int each : ended->streams)
    TORCH_CHECK(streams().clocks[ended->origin].of(each) >= streams().clocks[each].of(each),
                "CUDA error: capturing stream has unjoined work (stream ", each, ")");
  graphs().all[++graphs().last] = ended->graph;
  return graphs().last;
}

inline void replay(int64_t id, int stream) {
  std::shared_ptr<Graph> graph;
  uint64_t launch;
  {
    Held held(lock());
    TORCH_CHECK(!captures(stream), "CUDA error: operation not permitted when stream is capturing (replay)");
    graph = graphs().all.at(id);
    launch = streams().launch(stream);
  }
  for (auto& step : graph->steps) {
    for (auto& use : step.uses) {
      auto block = use.block.lock();
      TORCH_CHECK(block, "made-up GPU: a CUDA graph's ", step.who, use.write ? " writes" : " reads",
                  " memory that was freed since the capture (", use.range.end - use.range.begin, " bytes)");
      block->touch(use.range, use.write, stream, launch, "a CUDA graph's " + step.who, 0);
    }
    step.run();
  }
}

}  // namespace softgpu

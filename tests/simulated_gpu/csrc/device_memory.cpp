#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <sstream>

#include "knobs.h"
#include "memory.h"

namespace simulated {

// Device addresses are mapped twice: where tensors have them nobody may read or write, so that a program of the CPU
// that does dies as it would on a GPU; the streams' threads use the other mapping.
struct Arena {
  size_t nbytes = knob(kMemory);
  char *seen, *real;

  Arena() {
    int file = memfd_create("simulated_gpu", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && !ftruncate(file, nbytes), "simulated GPU: no memory of ", nbytes, " bytes");
    seen = static_cast<char*>(mmap(nullptr, nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    real = static_cast<char*>(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(seen != MAP_FAILED && real != MAP_FAILED, "simulated GPU: cannot map ", nbytes, " bytes");
    close(file);
  }
  bool holds(const void* address) const { return address >= seen && address < seen + nbytes; }
};

namespace {

constexpr size_t kSmallest = 512, kMostSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20;
constexpr size_t kLeastOwnSegment = 10 << 20, kSegmentRounding = 2 << 20;

std::array<std::atomic<Arena*>, kMostDevices> arenas{};

Arena* arena_holding(const void* address) {
  for (auto& arena : arenas)
    if (auto* found = arena.load(); found && found->holds(address)) return found;
  return nullptr;
}

}  // namespace

char* real_address(const void* address) {
  if (!address) return nullptr;
  auto* arena = arena_holding(address);
  TORCH_CHECK(arena, "simulated GPU: an illegal memory access: ", address, " is no address of a device");
  return arena->real + (static_cast<const char*>(address) - arena->seen);
}

struct DeviceAllocator::Segment {
  char* start;
  size_t size;
};

struct DeviceAllocator::Block {
  char* start;
  size_t size, requested = 0;
  Segment* segment;
  int64_t stream;
  bool small, in_use = false, pending = false;
  std::vector<Use> uses;         // by other streams, noted when it is given back
  std::set<Queue*> other_users;  // streams that record_stream named
};

struct DeviceAllocator::Device {
  using Pool = std::set<std::pair<size_t, char*>>;

  int index;
  Arena* arena;
  size_t limit;
  std::map<char*, std::unique_ptr<Block>> blocks;
  std::map<char*, std::unique_ptr<Segment>> segments;
  std::map<char*, size_t> room;  // of the arena, in no segment
  std::map<std::pair<bool, int64_t>, Pool> pools;  // (small, stream) -> (size, start)
  std::vector<Block*> pending;   // given back, but other streams use them
  c10::CachingDeviceAllocator::DeviceStats statistics;

  explicit Device(int index) : index(index), arena(new Arena), limit(arena->nbytes) {
    room[arena->seen] = arena->nbytes;
    arenas[index] = arena;
  }
  Pool& pool(const Block* block) { return pools[{block->small, block->stream}]; }
  size_t reserved() const { return statistics.reserved_bytes[0].current; }
};

namespace {

using Statistics = c10::CachingAllocator::StatArray;

void more(Statistics& of, bool small, size_t amount) {
  of[0].increase(amount);
  of[small ? 1 : 2].increase(amount);
}

void less(Statistics& of, bool small, size_t amount) {
  of[0].decrease(amount);
  of[small ? 1 : 2].decrease(amount);
}

// Poison: what reads memory that nobody has written finds NaN.
void poison(Queue* queue, char* start, size_t size) {
  if (knob(kPoison)) queue->put([real = real_address(start), size] { memset(real, 0xFF, size); });
}

}  // namespace

DeviceAllocator::DeviceAllocator() = default;

DeviceAllocator& device_allocator() {
  static auto* one = new DeviceAllocator;
  return *one;
}

static void release_device_memory(void* address) {
  if (address) device_allocator().release(address);
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const {
  return &release_device_memory;
}

DeviceAllocator::Device& DeviceAllocator::device(int index) {
  auto& found = devices_[index];
  if (!found) found = std::make_unique<Device>(index);
  return *found;
}

// ----------------------------------------------------------------------------------------------- taking and giving back

c10::DataPtr DeviceAllocator::allocate(size_t nbytes) {
  int index = current_device();
  c10::Device where(kDevice, static_cast<c10::DeviceIndex>(index));
  if (!nbytes) return {nullptr, nullptr, &release_device_memory, where};
  std::lock_guard<std::recursive_mutex> held(lock_);
  auto& on = device(index);
  size_t size = rounded_up(nbytes, kSmallest);
  bool small = size <= kMostSmall;
  int64_t stream = current_stream(index);
  free_pending(on, false);
  Block* block = take(on, small, stream, size);
  if (!block && grow(on, small, stream, size)) block = take(on, small, stream, size);
  if (!block) {
    on.statistics.num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory (simulated GPU ", index, "). Tried to allocate ", nbytes,
        " bytes. ", on.statistics.allocated_bytes[0].current, " are allocated, ", on.reserved(), " are reserved, ",
        on.limit, " are allowed.");
  }
  block = split(on, block, size);
  block->in_use = true;
  block->requested = nbytes;
  more(on.statistics.allocation, small, 1);
  more(on.statistics.active, small, 1);
  more(on.statistics.allocated_bytes, small, block->size);
  more(on.statistics.active_bytes, small, block->size);
  more(on.statistics.requested_bytes, small, nbytes);
  poison(queue_of(index, stream), block->start, block->size);
  return {block->start, block->start, &release_device_memory, where};
}

DeviceAllocator::Block* DeviceAllocator::take(Device& on, bool small, int64_t stream, size_t size) {
  auto& pool = on.pools[{small, stream}];
  auto fit = pool.lower_bound({size, nullptr});
  if (fit == pool.end()) return nullptr;
  auto* block = on.blocks.at(fit->second).get();
  pool.erase(fit);
  return block;
}

DeviceAllocator::Block* DeviceAllocator::split(Device& on, Block* block, size_t size) {
  size_t left = block->size - size;
  if (block->small || knob(kExpandable) ? left < kSmallest : left <= kMostSmall) return block;
  auto rest = std::make_unique<Block>();
  rest->start = block->start + size;
  rest->size = left;
  rest->segment = block->segment;
  rest->stream = block->stream;
  rest->small = block->small;
  on.pool(block).insert({left, rest->start});
  on.blocks[rest->start] = std::move(rest);
  block->size = size;
  return block;
}

void DeviceAllocator::release(void* address) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  auto* arena = arena_holding(address);
  if (!arena) return;
  auto& on = device(device_of(address));
  auto found = on.blocks.find(static_cast<char*>(address));
  if (found == on.blocks.end()) return;
  auto* block = found->second.get();
  block->in_use = false;
  less(on.statistics.allocation, block->small, 1);
  less(on.statistics.allocated_bytes, block->small, block->size);
  less(on.statistics.requested_bytes, block->small, block->requested);
  for (auto* queue : block->other_users) block->uses.push_back({queue, queue->issued()});
  block->other_users.clear();
  if (block->uses.empty()) {
    make_free(on, block);
  } else {
    block->pending = true;
    on.pending.push_back(block);
  }
}

void DeviceAllocator::make_free(Device& on, Block* block) {
  block->pending = false;
  block->uses.clear();
  less(on.statistics.active, block->small, 1);
  less(on.statistics.active_bytes, block->small, block->size);
  poison(queue_of(on.index, block->stream), block->start, block->size);
  join(on, block);
}

void DeviceAllocator::free_pending(Device& on, bool all) {
  std::vector<Block*> still;
  for (auto* block : on.pending) {
    bool over = true;
    for (auto& use : block->uses) {
      if (all) drain(use.queue, use.number);
      over = over && use.over();
    }
    over ? make_free(on, block) : still.push_back(block);
  }
  on.pending = std::move(still);
}

// A free block and free neighbours of the same segment become one.
void DeviceAllocator::join(Device& on, Block* block) {
  auto& pool = on.pool(block);
  auto idle = [&](const Block* other) {
    return other->segment == block->segment && !other->in_use && !other->pending;
  };
  auto at = on.blocks.find(block->start);
  if (auto next = std::next(at); next != on.blocks.end() && idle(next->second.get())) {
    pool.erase({next->second->size, next->first});
    block->size += next->second->size;
    on.blocks.erase(next);
  }
  if (at != on.blocks.begin() && idle(std::prev(at)->second.get())) {
    auto* before = std::prev(at)->second.get();
    pool.erase({before->size, before->start});
    before->size += block->size;
    on.blocks.erase(at);
    block = before;
  }
  pool.insert({block->size, block->start});
}

// ------------------------------------------------------------------------------------------------------------- segments

bool DeviceAllocator::grow(Device& on, bool small, int64_t stream, size_t size) {
  size_t want = small ? kSmallSegment : size < kLeastOwnSegment ? kLargeSegment : rounded_up(size, kSegmentRounding);
  for (bool again : {false, true}) {
    if (again) {
      on.statistics.num_alloc_retries++;
      free_pending(on, true);
      if (auto& pool = on.pools[{small, stream}]; pool.lower_bound({size, nullptr}) != pool.end()) return true;
      empty(on);
    }
    if (on.reserved() + want > on.limit) continue;
    for (auto& [start, free] : on.room) {
      if (free < want) continue;
      char* at = start;
      size_t left = free - want;
      on.room.erase(at);
      if (left) on.room[at + want] = left;
      auto segment = std::make_unique<Segment>(Segment{at, want});
      auto block = std::make_unique<Block>();
      block->start = at;
      block->size = want;
      block->segment = segment.get();
      block->stream = stream;
      block->small = small;
      on.pool(block.get()).insert({want, at});
      on.blocks[at] = std::move(block);
      on.segments[at] = std::move(segment);
      more(on.statistics.segment, small, 1);
      more(on.statistics.reserved_bytes, small, want);
      return true;
    }
  }
  return false;
}

void DeviceAllocator::empty(Device& on) {
  free_pending(on, true);
  std::vector<Block*> whole;
  for (auto& [start, block] : on.blocks)
    if (!block->in_use && !block->pending && block->size == block->segment->size) whole.push_back(block.get());
  if (whole.empty()) return;
  for (auto* queue : queues_of(on.index)) drain(queue, queue->issued());  // cudaFree waits for the device
  for (auto* block : whole) {
    char* at = block->start;
    size_t size = block->size;
    on.pool(block).erase({size, at});
    less(on.statistics.segment, block->small, 1);
    less(on.statistics.reserved_bytes, block->small, size);
    madvise(real_address(at), size, MADV_REMOVE);
    on.blocks.erase(at);
    on.segments.erase(at);
    auto next = on.room.lower_bound(at);
    if (next != on.room.end() && next->first == at + size) {
      size += next->second;
      next = on.room.erase(next);
    }
    if (next != on.room.begin() && std::prev(next)->first + std::prev(next)->second == at) {
      std::prev(next)->second += size;
    } else {
      on.room[at] = size;
    }
  }
}

void DeviceAllocator::emptyCache(c10::MempoolId_t) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  for (auto& on : devices_)
    if (on) empty(*on);
}

// ------------------------------------------------------------------------------------------------------ what is asked

void DeviceAllocator::used(const void* address, Queue* queue) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  if (!arena_holding(address)) return;
  auto& on = device(device_of(address));
  auto found = on.blocks.find(static_cast<char*>(const_cast<void*>(address)));
  if (found == on.blocks.end()) return;
  if (queue != queue_of(on.index, found->second->stream)) found->second->other_users.insert(queue);
}

void DeviceAllocator::copy_data(void* to, const void* from, size_t nbytes) const {
  auto *target = real_address(to), *source = real_address(from);
  current_queue(current_device())->put([=] { memcpy(target, source, nbytes); });
}

int DeviceAllocator::device_of(const void* address) {
  for (int index = 0; index < kMostDevices; index++)
    if (auto* arena = arenas[index].load(); arena && arena->holds(address)) return index;
  TORCH_CHECK(false, "simulated GPU: ", address, " is no address of a device");
}

void DeviceAllocator::set_limit(int index, size_t nbytes) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  auto& on = device(index);
  on.limit = std::min(nbytes, on.arena->nbytes);
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex index) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  return device(index).statistics;
}

template <class F>
static void each_statistic(c10::CachingDeviceAllocator::DeviceStats& of, F change) {
  for (auto* all : {&of.allocation, &of.segment, &of.active, &of.inactive_split, &of.allocated_bytes,
                    &of.reserved_bytes, &of.active_bytes, &of.inactive_split_bytes, &of.requested_bytes})
    for (auto& one : *all) change(one);
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex index) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  auto& statistics = device(index).statistics;
  each_statistic(statistics, [](auto& one) { one.reset_accumulated(); });
  statistics.num_alloc_retries = statistics.num_ooms = 0;
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex index) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  each_statistic(device(index).statistics, [](auto& one) { one.reset_peak(); });
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex index) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  auto& on = device(index);
  return {on.arena->nbytes - on.reserved(), on.arena->nbytes};
}

std::string DeviceAllocator::blocks_of(int index) {
  std::lock_guard<std::recursive_mutex> held(lock_);
  std::ostringstream lines;
  for (auto& [start, block] : device(index).blocks)
    lines << reinterpret_cast<size_t>(start) << '\t' << block->size << '\t' << block->stream << '\t'
          << (block->in_use || block->pending) << '\t' << reinterpret_cast<size_t>(block->segment->start) << '\t'
          << block->segment->size << '\n';
  return lines.str();
}

}  // namespace simulated

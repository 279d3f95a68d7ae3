#include <c10/util/llvmMathExtras.h>

#include <cstdlib>
#include <cstring>

#include "knobs.h"
#include "memory.h"

namespace simulated {
namespace {

struct Range {
  size_t nbytes;
  std::vector<Use> uses;

  void forget_over() {
    uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Use& use) { return use.over(); }), uses.end());
  }
};

struct Ranges {  // never destroyed: memory may be given back while the process ends
  std::mutex lock;
  std::map<char*, Range> all;

  // The range that holds an address. The lock is held.
  Range* holding(const void* address) {
    auto next = all.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == all.begin()) return nullptr;
    auto& [start, range] = *std::prev(next);
    return static_cast<const char*>(address) < start + range.nbytes ? &range : nullptr;
  }
};

Ranges& ranges() {
  static auto* one = new Ranges;
  return *one;
}

}  // namespace

void lock_pages(void* address, size_t nbytes) {
  std::lock_guard<std::mutex> held(ranges().lock);
  TORCH_CHECK(!ranges().holding(address), "simulated GPU: this memory is page-locked already");
  ranges().all[static_cast<char*>(address)] = {nbytes, {}};
}

bool unlock_pages(void* address) {
  std::lock_guard<std::mutex> held(ranges().lock);
  auto found = ranges().all.find(static_cast<char*>(address));
  if (found == ranges().all.end()) return false;
  found->second.forget_over();
  bool used = !found->second.uses.empty();
  ranges().all.erase(found);
  TORCH_CHECK(!used, "simulated GPU: page-locked memory was unregistered while a copy used it");
  return true;
}

bool pages_locked(const void* address, size_t nbytes) {
  std::lock_guard<std::mutex> held(ranges().lock);
  auto* range = ranges().holding(address);
  return range && ranges().holding(static_cast<const char*>(address) + nbytes - 1) == range;
}

void used_by_copy(const void* address, Use use) {
  std::lock_guard<std::mutex> held(ranges().lock);
  if (auto* range = ranges().holding(address)) {
    range->forget_over();
    range->uses.push_back(use);
  }
}

// ------------------------------------------------------------------------------------------------------------ allocator

HostAllocator& host_allocator() {
  static auto* one = new HostAllocator;
  return *one;
}

static void release_host_memory(void* address) {
  if (address) host_allocator().release(address);
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const {
  return &release_host_memory;
}

// No copy uses the range any more.
static bool is_idle(char* address) {
  std::lock_guard<std::mutex> held(ranges().lock);
  auto& range = ranges().all.at(address);
  range.forget_over();
  return range.uses.empty();
}

static size_t size_of(char* address) {
  std::lock_guard<std::mutex> held(ranges().lock);
  return ranges().all.at(address).nbytes;
}

c10::DataPtr HostAllocator::allocate(size_t nbytes) {
  if (!nbytes) return {nullptr, nullptr, &release_host_memory, c10::Device(c10::DeviceType::CPU)};
  std::lock_guard<std::mutex> held(lock_);
  size_t size = c10::llvm::PowerOf2Ceil(nbytes);
  char* found = nullptr;
  auto& kept = idle_[size];
  for (auto one = kept.begin(); one != kept.end() && !found; ++one) {
    if (!is_idle(*one)) continue;
    found = *one;
    kept.erase(one);
    break;
  }
  if (!found) {
    void* made = nullptr;
    TORCH_CHECK(!posix_memalign(&made, 4096, rounded_up(size, 4096)), "simulated GPU: no host memory of ", size);
    found = static_cast<char*>(made);
    lock_pages(found, size);
    statistics_.allocations.increase(1);
    statistics_.allocated_bytes.increase(size);
    statistics_.num_host_alloc++;
  }
  if (knob(kPoison)) memset(found, 0xFF, size);
  statistics_.active_requests.increase(1);
  statistics_.active_bytes.increase(size);
  return {found, found, &release_host_memory, c10::Device(c10::DeviceType::CPU)};
}

void HostAllocator::release(void* address) {
  std::lock_guard<std::mutex> held(lock_);
  auto* start = static_cast<char*>(address);
  size_t size = size_of(start);
  if (knob(kPoison) && is_idle(start)) memset(start, 0xFF, size);  // shows who reads on
  statistics_.active_requests.decrease(1);
  statistics_.active_bytes.decrease(size);
  idle_[size].push_back(start);
}

void HostAllocator::empty_cache() {
  std::lock_guard<std::mutex> held(lock_);
  for (auto& [size, kept] : idle_) {
    std::vector<char*> used;
    for (char* start : kept) {
      if (!is_idle(start)) {
        used.push_back(start);
        continue;
      }
      unlock_pages(start);
      free(start);
      statistics_.allocations.decrease(1);
      statistics_.allocated_bytes.decrease(size);
      statistics_.num_host_free++;
    }
    kept = std::move(used);
  }
}

void HostAllocator::copy_data(void* to, const void* from, size_t nbytes) const {
  memcpy(to, from, nbytes);
}

bool HostAllocator::record_event(void* address, void*, c10::Stream stream) {
  auto* queue = queue_of(stream);
  used_by_copy(address, {queue, queue->issued()});
  return true;
}

at::HostStats HostAllocator::get_stats() {
  std::lock_guard<std::mutex> held(lock_);
  return statistics_;
}

template <class F>
static void each_statistic(at::HostStats& of, F change) {
  for (auto* one : {&of.active_requests, &of.active_bytes, &of.allocations, &of.allocated_bytes}) change(*one);
}

void HostAllocator::reset_accumulated_stats() {
  std::lock_guard<std::mutex> held(lock_);
  each_statistic(statistics_, [](auto& one) { one.reset_accumulated(); });
}

void HostAllocator::reset_peak_stats() {
  std::lock_guard<std::mutex> held(lock_);
  each_statistic(statistics_, [](auto& one) { one.reset_peak(); });
}

}  // namespace simulated

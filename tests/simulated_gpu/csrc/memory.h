// Memory of the devices and page-locked memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <set>

#include "common.h"
#include "queues.h"

namespace simulated {

// Where the stream's threads find what a tensor has at a device address.
char* real_address(const void* device_address);

// PyTorch's caching allocator: sizes rounded to 512 bytes; segments of 2 MiB for small blocks, of 20 MiB or more for
// large ones; blocks belong to the stream that was current when they were first taken.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  DeviceAllocator();
  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t nbytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { used(data.get(), queue_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  void used(const void* address, Queue* queue);
  void release(void* address);
  void set_limit(int device, size_t nbytes);
  int device_of(const void* address);
  // Lines of: address, size, stream, 1 if in use, address of its segment, size of that; separated by tabulators.
  std::string blocks_of(int device);

 private:
  struct Block;
  struct Segment;
  struct Device;

  Device& device(int index);
  Block* take(Device& on, bool small, int64_t stream, size_t size);
  Block* split(Device& on, Block* block, size_t size);
  bool grow(Device& on, bool small, int64_t stream, size_t size);
  void join(Device& on, Block* block);
  void make_free(Device& on, Block* block);
  void free_pending(Device& on, bool all);
  void empty(Device& on);

  std::recursive_mutex lock_;
  std::array<std::unique_ptr<Device>, kMostDevices> devices_;
};

DeviceAllocator& device_allocator();

// PyTorch's caching allocator of page-locked memory: sizes rounded to powers of two; what is given back is kept, and
// taken again once the copies that used it are done.
class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t nbytes) const override;
  bool record_event(void* address, void* context, c10::Stream stream) override;
  void empty_cache() override;
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  void release(void* address);

 private:
  std::mutex lock_;
  std::map<size_t, std::vector<char*>> idle_;
  at::HostStats statistics_;
};

HostAllocator& host_allocator();

// cuBLAS takes a workspace for each (thread, stream) at its first product there, and keeps it.
void take_workspace(int device);
void free_workspaces();

// Page-locked ranges, the allocator's and those that the program registered itself.
void lock_pages(void* address, size_t nbytes);
// False: nothing is registered there. Raises when a copy still uses the range.
bool unlock_pages(void* address);
// The whole range lies in one that is page-locked.
bool pages_locked(const void* address, size_t nbytes = 1);
// A copy uses the range that has this address.
void used_by_copy(const void* address, Use use);

}  // namespace simulated

// Streams are queues with a thread each; events are places in a queue. Each thread of the host has its own current
// device and its own current stream of each device, as on CUDA.
#pragma once

#include "common.h"

namespace simulated {

class Queue {
 public:
  Queue(int device, int64_t id) : device(device), id(id) {}

  // Append a job and return its number. The host goes on.
  uint64_t put(std::function<void()> job);
  void wait(uint64_t number);
  bool reached(uint64_t number);
  uint64_t issued();
  // Jobs that have not begun do not begin until it is resumed: what depends on luck elsewhere is certain then.
  void pause(bool paused);
  bool paused();
  // Drop the jobs that have not begun, wait for the one that has. Later jobs are dropped too.
  void stop();

  const int device;
  const int64_t id;
  double virtual_end = 0;  // when its last job ends; the clock's lock guards it

 private:
  void work();
  void run(std::function<void()>& job);

  std::mutex lock_;
  std::condition_variable more_, fewer_;
  std::deque<std::function<void()>> jobs_;
  uint64_t issued_ = 0, done_ = 0;
  int waiting_ = 0;
  bool started_ = false, idle_ = false, busy_ = false, paused_ = false, stopped_ = false;
};

// A use of memory by a stream: over once the queue has done the job of that number.
struct Use {
  Queue* queue;
  uint64_t number;
  bool over() const { return queue->reached(number); }
};

int current_device();
void set_current_device(int device);
int device_or_current(int device);
int64_t& current_stream(int device);
Queue* queue_of(int device, int64_t id);
Queue* queue_of(const c10::Stream& stream);
Queue* current_queue(int device);
std::vector<Queue*> queues_of(int device);

// The host waits for a queue, a device, all jobs of the process; `who` asked for it. Raises what a job raised.
void synchronize(Queue* queue, const std::string& who);
void synchronize_device(int device, const std::string& who);
// For the allocators' own needs: not counted, and the interpreter's lock is kept. Whoever waits here holds an allocator's
// lock, and others may want that while they hold the interpreter's.
void drain(Queue* queue, uint64_t number);
// The host waits for one job, which the caller has counted.
void wait_for(Queue* queue, uint64_t number);

// A job's error shows at a later call, as on CUDA.
void raise_late_error();
void stop_all_queues();
// Sleeps unless the process is ending.
void sleep_microseconds(int64_t microseconds);

}  // namespace simulated

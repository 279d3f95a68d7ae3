#include "queues.h"

#include <Python.h>
#include <omp.h>
#include <pthread.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "clock.h"
#include "knobs.h"

namespace simulated {
namespace {

using Real = std::chrono::steady_clock;

std::atomic<bool> ending{false};
// In a forked child the threads do not exist: nothing may wait for them.
std::atomic<bool> forked{false};
[[maybe_unused]] const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Shared {  // never destroyed: threads outlive static objects
  std::mutex queues_lock;
  std::array<std::vector<Queue*>, kMostDevices> queues;
  std::mutex error_lock;
  std::string error;
  std::mutex sleep_lock;
  std::condition_variable awake;
};

Shared& shared() {
  static auto* one = new Shared;
  return *one;
}

thread_local int device_of_thread = 0;
thread_local std::array<int64_t, kMostDevices> stream_of_thread{};

void keep_error(const char* what) {
  std::lock_guard<std::mutex> held(shared().error_lock);
  if (shared().error.empty()) shared().error = what;
}

// The host is blocked: others may use the interpreter meanwhile, and the time is counted.
class Blocked {
 public:
  Blocked() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~Blocked() {
    if (state_) PyEval_RestoreThread(state_);
    count(kBlocked, std::chrono::duration_cast<std::chrono::microseconds>(Real::now() - since_).count());
  }

 private:
  PyThreadState* state_;
  Real::time_point since_ = Real::now();
};

}  // namespace

// -------------------------------------------------------------------------------------------------------------- queues

uint64_t Queue::put(std::function<void()> job) {
  std::lock_guard<std::mutex> held(lock_);
  if (stopped_ || forked) return issued_;
  jobs_.push_back(std::move(job));
  if (!started_) {
    std::thread([this] { work(); }).detach();
    started_ = true;
  } else if (idle_) {
    more_.notify_one();
  }
  return ++issued_;
}

void Queue::wait(uint64_t number) {
  std::unique_lock<std::mutex> held(lock_);
  waiting_++;
  fewer_.wait(held, [&] { return done_ >= number || stopped_ || forked; });
  waiting_--;
}

bool Queue::reached(uint64_t number) {
  std::lock_guard<std::mutex> held(lock_);
  return done_ >= number || stopped_ || forked;
}

uint64_t Queue::issued() {
  std::lock_guard<std::mutex> held(lock_);
  return issued_;
}

void Queue::pause(bool paused) {
  std::lock_guard<std::mutex> held(lock_);
  paused_ = paused;
  more_.notify_all();
}

bool Queue::paused() {
  std::lock_guard<std::mutex> held(lock_);
  return paused_;
}

void Queue::stop() {
  std::unique_lock<std::mutex> held(lock_);
  stopped_ = true;
  // What the jobs hold is not destroyed: at the end of a process it may no longer be safe to.
  new std::deque<std::function<void()>>(std::move(jobs_));
  jobs_.clear();
  more_.notify_all();
  fewer_.notify_all();
  if (!forked) fewer_.wait(held, [&] { return !busy_; });
}

void Queue::work() {
  at::init_num_threads();
  omp_set_num_threads(1);  // a device is one processor; many small teams of threads would be slow
  at::AutoDispatchBelowADInplaceOrView below;
  unsigned random = static_cast<unsigned>(knob(kSeed) * 1009 + device * 101 + id + 17);
  std::unique_lock<std::mutex> held(lock_);
  while (true) {
    idle_ = true;
    more_.wait(held, [&] { return (!jobs_.empty() && !paused_) || stopped_; });
    idle_ = false;
    if (stopped_) return;
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    held.unlock();
    if (int64_t lag = knob(kLag)) sleep_microseconds(rand_r(&random) % (2 * lag + 1));
    run(job);
    held.lock();
    busy_ = false;
    ++done_;
    if (waiting_ || stopped_) fewer_.notify_all();
  }
}

void Queue::run(std::function<void()>& job) {
  try {
    job();
    job = nullptr;
  } catch (const std::exception& error) {
    keep_error(error.what());
  }
}

Queue* queue_of(int device, int64_t id) {
  auto& all = shared();
  std::lock_guard<std::mutex> held(all.queues_lock);
  auto& mine = all.queues[device];
  while (static_cast<int64_t>(mine.size()) <= id) mine.push_back(new Queue(device, mine.size()));
  return mine[id];
}

Queue* queue_of(const c10::Stream& stream) {
  return queue_of(stream.device_index(), stream.id());
}

Queue* current_queue(int device) {
  return queue_of(device, current_stream(device));
}

std::vector<Queue*> queues_of(int device) {
  std::lock_guard<std::mutex> held(shared().queues_lock);
  return shared().queues[device];
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  TORCH_CHECK(device < knob(kDevices), "simulated GPU: invalid device ordinal ", device);
  if (device >= 0) device_of_thread = device;
}

int device_or_current(int device) {
  return device < 0 ? device_of_thread : device;
}

int64_t& current_stream(int device) {
  return stream_of_thread[device];
}

// ----------------------------------------------------------------------------------------------------- the host waits

void drain(Queue* queue, uint64_t number) {
  queue->wait(number);
}

void wait_for(Queue* queue, uint64_t number) {
  if (queue->reached(number)) return;
  TORCH_CHECK(!queue->paused(), "simulated GPU: the host waits for a stream that is paused, which would take for ever");
  Blocked blocked;
  queue->wait(number);
}

void synchronize(Queue* queue, const std::string& who) {
  count_synchronisation(who);
  wait_for(queue, queue->issued());
  virtual_clock().host_waits_for(queue);
  raise_late_error();
}

void synchronize_device(int device, const std::string& who) {
  count_synchronisation(who);
  for (auto* queue : queues_of(device)) {
    wait_for(queue, queue->issued());
    virtual_clock().host_waits_for(queue);
  }
  raise_late_error();
}

void raise_late_error() {
  std::lock_guard<std::mutex> held(shared().error_lock);
  if (shared().error.empty()) return;
  std::string error;
  error.swap(shared().error);
  TORCH_CHECK(false, "simulated GPU: an earlier job failed: ", error);
}

void sleep_microseconds(int64_t microseconds) {
  std::unique_lock<std::mutex> held(shared().sleep_lock);
  shared().awake.wait_for(held, std::chrono::microseconds(microseconds), [] { return ending.load(); });
}

void stop_all_queues() {
  {
    std::lock_guard<std::mutex> held(shared().sleep_lock);
    ending = true;
  }
  shared().awake.notify_all();
  // First all are told to stop: a job may be waiting for another queue.
  std::vector<Queue*> all;
  for (int device = 0; device < kMostDevices; device++)
    for (auto* queue : queues_of(device)) all.push_back(queue);
  std::vector<std::thread> stopping;
  for (auto* queue : all) stopping.emplace_back([queue] { queue->stop(); });
  for (auto& thread : stopping) thread.join();
}

}  // namespace simulated

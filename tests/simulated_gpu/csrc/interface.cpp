// What Python calls, by ctypes.
#include "clock.h"
#include "knobs.h"
#include "memory.h"
#include "queues.h"

namespace simulated {

extern std::atomic<bool> gives_default_generators;
bool register_device();
double virtual_time_of_event(void* event);

namespace {

// Errors cannot pass through ctypes: they are kept for Python to ask.
thread_local std::string last_error;
thread_local std::string last_text;

template <class F>
int guarded(F call) {
  try {
    call();
    return 0;
  } catch (const c10::Error& error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return 1;
}

const char* kept(std::string text) {
  last_text = std::move(text);
  return last_text.c_str();
}

void issue_sleep(int64_t microseconds) {
  auto* queue = current_queue(current_device());
  count(kJobs);
  virtual_clock().sleep(queue, 1e-6 * static_cast<double>(microseconds));
  if (virtual_clock().on()) return;
  queue->put([microseconds] { sleep_microseconds(microseconds); });
}

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

const char* sim_error() { return last_error.c_str(); }
int sim_register() { return register_device(); }
void sim_stop() { stop_all_queues(); }

// ---- knobs and counters
void sim_set_knob(int which, int64_t value) { set_knob(static_cast<Knob>(which), value); }
int64_t sim_knob(int which) { return knob(static_cast<Knob>(which)); }
int64_t sim_counter(int which) { return counted(static_cast<Counter>(which)); }
const char* sim_synchronisations() { return kept(synchronisations()); }
void sim_listen(Listener listener) { listen(listener); }

// ---- devices and streams
int sim_device() { return current_device(); }
int sim_set_device(int device) {
  return guarded([&] { set_current_device(device); });
}
void sim_pause(int device, int64_t stream, bool paused) { queue_of(device, stream)->pause(paused); }
void sim_sleep(int64_t microseconds) { issue_sleep(microseconds); }
void sim_default_generators(bool give) { gives_default_generators = give; }

// ---- memory
int sim_register_host(void* address, size_t nbytes) {
  return guarded([&] { lock_pages(address, nbytes); });
}
int sim_unregister_host(void* address) {
  bool found = false;
  int failed = guarded([&] { found = unlock_pages(address); });
  return failed ? 2 : found ? 0 : 1;
}
void sim_set_limit(int device, size_t nbytes) { device_allocator().set_limit(device, nbytes); }
void sim_memory_information(int device, size_t* free, size_t* total) {
  std::tie(*free, *total) = device_allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(device));
}
const char* sim_blocks(int device) { return kept(device_allocator().blocks_of(device)); }
void sim_free_workspaces() { free_workspaces(); }
void sim_host_memory(int64_t* numbers) {
  auto found = host_allocator().get_stats();
  int k = 0;
  for (auto& one : {found.allocations, found.allocated_bytes, found.active_requests, found.active_bytes}) {
    numbers[k++] = one.current;
    numbers[k++] = one.peak;
    numbers[k++] = one.allocated;
    numbers[k++] = one.freed;
  }
  numbers[k++] = found.num_host_alloc;
  numbers[k++] = found.num_host_free;
}

// ---- the virtual clock
void sim_set_clock(const Card* card) { virtual_clock().set(card); }
double sim_host_time() { return virtual_clock().host(); }
void sim_host_reaches(double moment) { virtual_clock().host_reaches(moment); }
void sim_host_works(const char* name, double seconds) { virtual_clock().host_works(name, seconds); }
double sim_stream_time(int device, int64_t stream) { return virtual_clock().moment(queue_of(device, stream)); }
void sim_hold_stream(int device, int64_t stream, double moment) { virtual_clock().hold(queue_of(device, stream), moment); }
double sim_event_time(void* event) { return virtual_time_of_event(event); }
double sim_lane(const char* lane, const char* name, double seconds, double earliest, int64_t nbytes) {
  return virtual_clock().lane(lane, name, seconds, earliest, nbytes);
}
const char* sim_record() { return kept(virtual_clock().record()); }
void sim_forget_record() { virtual_clock().forget_record(); }

}  // extern "C"

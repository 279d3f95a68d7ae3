// Streams, events and devices as PyTorch asks for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "clock.h"
#include "knobs.h"
#include "memory.h"
#include "queues.h"

namespace simulated {
namespace {

using Real = std::chrono::steady_clock;

struct Event {
  Queue* queue = nullptr;
  uint64_t number = 0;
  double virtual_time = 0;
  uint64_t setting = 0;  // of the clock; an event of an earlier one is older than all that the clock knows
  // Shared with the job that writes it: the event may be recorded again, or destroyed, before that runs.
  std::shared_ptr<Real::time_point> happened;

  double moment() const { return setting == virtual_clock().setting() ? virtual_time : 0; }
  bool over() const { return !queue || queue->reached(number); }
};

// With a virtual clock its time decides, and not how fast this machine is: all runs agree. Who asks in a loop gets on.
bool has_happened(Queue* queue, uint64_t number, double moment) {
  if (!virtual_clock().on() || queue->paused()) return queue->reached(number);
  if (!virtual_clock().host_asks_whether_past(moment)) return false;
  drain(queue, number);
  return true;
}

// PyTorch hands out 32 streams of each device in turn, and so do we: two handles may be one stream.
constexpr int64_t kPool = 32;
std::array<std::atomic<int64_t>, kMostDevices> streams_given{};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  c10::DeviceType type() const override { return kDevice; }

  // ---- devices
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < knob(kDevices)) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(knob(kDevices)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device_or_current(device), "synchronize (device)");
  }

  // ---- streams
  c10::Device known(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream stream(c10::Device device, int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  c10::Stream getStream(c10::Device device) const override {
    device = known(device);
    return stream(device, current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(known(device), 0); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    device = known(device);
    return stream(device, 1 + streams_given[device.index()]++ % kPool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream(to.device_index()) = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& of) const override {
    auto* queue = queue_of(of);
    return has_happened(queue, queue->issued(), virtual_clock().moment(queue));
  }
  void synchronizeStream(const c10::Stream& of) const override { synchronize(queue_of(of), "synchronize (stream)"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    device_allocator().used(data.get(), queue_of(on));
  }

  // ---- events
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** place, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*place) *place = new Event;
    auto* event = static_cast<Event*>(*place);
    auto happened = event->happened = std::make_shared<Real::time_point>();
    event->queue = queue_of(on);
    event->virtual_time = virtual_clock().moment(event->queue);
    event->setting = virtual_clock().setting();
    event->number = event->queue->put([happened] { *happened = Real::now(); });
  }
  void block(void* place, const c10::Stream& waiting) const override {
    auto* event = static_cast<Event*>(place);
    auto* queue = queue_of(waiting);
    if (!event || !event->queue || event->queue == queue) return;
    virtual_clock().hold(queue, event->moment());
    queue->put([source = event->queue, number = event->number] { source->wait(number); });
  }
  bool queryEvent(void* place) const override {
    auto* event = static_cast<Event*>(place);
    return !event || !event->queue || has_happened(event->queue, event->number, event->moment());
  }
  void synchronizeEvent(void* place) const override {
    auto* event = static_cast<Event*>(place);
    if (!event || !event->queue) return;
    count_synchronisation("synchronize (event)");
    wait_for(event->queue, event->number);
    virtual_clock().host_reaches(event->moment());
    raise_late_error();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *first = static_cast<Event*>(from), *last = static_cast<Event*>(to);
    TORCH_CHECK(first && last && first->queue && last->queue, "Both events must be recorded before their elapsed time");
    TORCH_CHECK(first->over() && last->over(), "Both events must have happened before their elapsed time");
    if (virtual_clock().on()) return 1e3 * (last->moment() - first->moment());
    return std::chrono::duration<double, std::milli>(*last->happened - *first->happened).count();
  }
};

c10::impl::DeviceGuardImplRegistrar registered(kDevice, new Guard);

}  // namespace

double virtual_time_of_event(void* event) {
  return event ? static_cast<Event*>(event)->moment() : 0;
}

}  // namespace simulated

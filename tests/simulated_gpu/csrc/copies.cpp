// Copies, as CUDA orders them. From page-locked memory and back: the stream copies while the host goes on, which may see
// old bytes until then. From other memory: read at once. To other memory, or without non_blocking: the host waits.
#include "clock.h"
#include "knobs.h"
#include "memory.h"
#include "shadow.h"

namespace simulated {
namespace {

// The same bytes in the same order: one memory copy, for which no other tensor is needed.
bool is_plain(const Tensor& to, const Tensor& from) {
  return to.dtype() == from.dtype() && to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
      to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

// A view of the host's memory that, like the copy engine, keeps nothing alive.
Tensor borrowed(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [](void*) {},
                       tensor.options().device(at::kCPU));
}

void slow_down(Knob direction, int64_t nbytes) {
  if (int64_t per_mib = knob(direction)) sleep_microseconds(per_mib * nbytes >> 20);
}

void issue_copy(Queue* queue, Knob direction, Tensor to, Tensor from, const Tensor& on_host, bool noted) {
  count(kJobs);
  int64_t nbytes = to.nbytes();
  direction == kCopyIn ? virtual_clock().copy_in(queue, nbytes) : virtual_clock().copy_out(queue, nbytes);
  count(direction == kCopyIn ? kCopiesIn : kCopiesOut);
  auto number = queue->put([to, from, direction, nbytes]() mutable {
    slow_down(direction, nbytes);
    to.copy_(from);
  });
  if (noted) used_by_copy(on_host.const_data_ptr(), {queue, number});
}

void copy_in(const Tensor& self, const Tensor& source, bool non_blocking) {
  auto* queue = current_queue(self.get_device());
  bool locked = source.is_cpu() && pages_locked(source.const_data_ptr(), source.numel() ? source.nbytes() : 1);
  if (locked && is_plain(self, source)) {
    issue_copy(queue, kCopyIn, shadow(self), borrowed(source), source, true);
    if (!non_blocking) synchronize(queue, "copy_ to the device");
    return;
  }
  count_synchronisation("copy_ to the device from pageable memory");
  issue_copy(queue, kCopyIn, shadow(self), source.clone(), source, false);
}

void copy_out(const Tensor& self, const Tensor& source, bool non_blocking) {
  auto* queue = current_queue(source.get_device());
  bool locked = pages_locked(self.const_data_ptr(), self.nbytes());
  if (locked && non_blocking && is_plain(self, source)) {
    issue_copy(queue, kCopyOut, borrowed(self), shadow(source), self, true);
    return;
  }
  issue_copy(queue, kCopyOut, borrowed(self), shadow(source), self, false);
  synchronize(queue, locked ? "copy_ from the device" : "copy_ from the device to pageable memory");
}

// CUDA copies on the source's stream, which first waits for the target's, which then waits for it.
void copy_between(const Tensor& self, const Tensor& source) {
  auto* from = current_queue(source.get_device());
  auto* to = current_queue(self.get_device());
  count(kJobs);
  count(kCopiesBetween);
  virtual_clock().copy_between(from, to, self.nbytes());
  from->put([to, ready = to->issued()] { to->wait(ready); });
  auto copied = from->put([a = shadow(self), b = shadow(source)] { a.copy_(b); });
  to->put([from, copied] { from->wait(copied); });
}

void copy_within(const Tensor& self, const Tensor& source) {
  count(kCopiesWithin);
  issue_kernel(current_queue(self.get_device()), "aten::copy_", 0, self.scalar_type(), self.nbytes() + source.nbytes(),
               [a = shadow(self), b = shadow(source)] { a.copy_(b); });
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.is_same(given)) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  raise_late_error();
  Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  if (!self.numel()) return self;
  if (!on_device(self)) {
    c10::DeviceGuard guard(source.device());
    copy_out(self, source, non_blocking);
  } else if (!on_device(source)) {
    c10::DeviceGuard guard(self.device());
    copy_in(self, source, non_blocking);
  } else if (self.device() != source.device()) {
    copy_between(self, source);
  } else {
    c10::DeviceGuard guard(self.device());
    copy_within(self, source);
  }
  return self;
}

TORCH_LIBRARY_IMPL(aten, SIMULATED_TYPE, m) {
  m.impl("copy_", copy_);
}

}  // namespace
}  // namespace simulated

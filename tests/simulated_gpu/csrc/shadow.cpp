#include "shadow.h"

#include <cstring>

#include "clock.h"
#include "knobs.h"
#include "memory.h"

namespace simulated {

static void copy_marks(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}

Tensor shadow(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  const void* storage = tensor.storage().data();
  if (!storage) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* start = real_address(storage) + tensor.storage_offset() * tensor.dtype().itemsize();
  auto found = at::from_blob(start, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  copy_marks(tensor, found);
  return found;
}

Tensor shape_only(const Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  int64_t elements = tensor.storage().nbytes() / std::max<size_t>(1, tensor.dtype().itemsize());
  auto storage = at::empty({elements}, at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta));
  auto found = storage.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  copy_marks(tensor, found);
  return found;
}

Tensor new_tensor(c10::Device device, IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), c10::DispatchKeySet(kKey), dtype);
}

void resize(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  size_t need = at::detail::computeStorageNbytes(sizes, strides, tensor.dtype().itemsize(), tensor.storage_offset());
  if (need > storage->nbytes()) {
    c10::DeviceGuard guard(tensor.device());
    auto fresh = device_allocator().allocate(need);
    if (size_t kept = storage->nbytes()) device_allocator().copy_data(fresh.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(need);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

void issue_kernel(Queue* queue, const char* name, double operations, at::ScalarType dtype, int64_t nbytes,
                  std::function<void()> job) {
  count(kJobs);
  virtual_clock().kernel(queue, name, operations, dtype, nbytes);
  queue->put(std::move(job));
}

}  // namespace simulated

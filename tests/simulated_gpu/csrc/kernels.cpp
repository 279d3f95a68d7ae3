// Operators that are no work of the device's, or that its kernels do differently from the CPU's: factories, views,
// storages, numbers for the host, dropout.
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>

#include "knobs.h"
#include "memory.h"
#include "operators.h"
#include "shadow.h"

namespace simulated {
namespace {

// -------------------------------------------------------------------------------------------------------- factories

void check_layout(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "simulated GPU: only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_layout(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  check_layout(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}

// --------------------------------------------------------------------------------------------------------- storages

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto shape = at::empty(size, self.options().device(at::kMeta), format);
  resize(self, size, shape.strides());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  std::vector<int64_t> contiguous(sizes.size());
  int64_t step = 1;
  for (size_t k = sizes.size(); k-- > 0; step *= std::max<int64_t>(1, sizes[k])) contiguous[k] = step;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(sizes, strides.size() == sizes.size() ? strides : IntArrayRef(contiguous));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(elements)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), c10::fromIntArrayRefSlow(other.sizes()),
                     c10::fromIntArrayRefSlow(other.strides()));
}

Tensor& set_nothing(Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

void record_stream(Tensor& self, at::Stream stream) {
  device_allocator().used(self.storage().data(), queue_of(stream));
}

// ------------------------------------------------------------------------------------------------------ for the host

at::Scalar local_scalar(const Tensor& self) {
  synchronize(current_queue(self.get_device()), "aten::_local_scalar_dense");
  return shadow(self).item();
}

// ----------------------------------------------------------------------------------------------------------- dropout

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

// There is no cuDNN.
bool uses_cudnn_ctc(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t) {
  return false;
}

bool uses_cudnn_ctc_by_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) {
  return false;
}

TORCH_LIBRARY_IMPL(aten, SIMULATED_TYPE, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("native_dropout", native_dropout);
  m.impl("_use_cudnn_ctc_loss", uses_cudnn_ctc);
  m.impl("_use_cudnn_ctc_loss.Tensor", uses_cudnn_ctc_by_tensors);
}

}  // namespace
}  // namespace simulated

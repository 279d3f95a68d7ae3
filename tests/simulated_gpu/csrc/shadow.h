// How a tensor of the device looks to others: to the stream's thread, which computes with CPU kernels, and to PyTorch's
// shape inference.
#pragma once

#include "queues.h"
#include "tensors.h"

namespace simulated {

inline bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

inline bool has_16_bits(const Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
}

// The same numbers as a CPU tensor. Like a kernel, it keeps nothing alive: memory that is given back too early shows.
Tensor shadow(const Tensor& tensor);
// The same shape, strides, dtype and storage size on the device "meta".
Tensor shape_only(const Tensor& tensor);
// New memory of a device.
Tensor new_tensor(c10::Device device, IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype);
// Change sizes and strides, and take more memory where it is needed, as an `out=` of another shape does.
void resize(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides);

// The value with each tensor in it replaced by what `change` makes of it.
template <class F>
IValue mapped(const IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& one : value.toTensorVector()) all.push_back(change(one));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const auto& one : value.toOptionalTensorVector()) all.push_back(one ? std::optional<Tensor>(change(*one)) : one);
    return all;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F look) {
  if (value.isTensor()) {
    look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& one : value.toTensorVector()) look(one);
  } else if (value.isOptionalTensorList()) {
    for (const auto& one : value.toOptionalTensorVector())
      if (one) look(*one);
  }
}

// Issue a kernel: `job` runs on the stream's thread. The clock counts its operations and bytes.
void issue_kernel(Queue* queue, const char* name, double operations, at::ScalarType dtype, int64_t nbytes,
                  std::function<void()> job);

}  // namespace simulated

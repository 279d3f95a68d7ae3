// PyTorch's tensors and operators.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "common.h"

namespace simulated {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

}  // namespace simulated

// Kernels that a GPU has and the CPU has not: each is one job, written with the CPU's operators.
#pragma once

#include "shadow.h"

namespace simulated {

// Issue a job that computes all of `targets`, tensors of the device: `compute` returns the numbers of each, where an
// undefined tensor leaves its target alone.
template <class F>
void issue_fused(const char* name, double operations, const std::vector<Tensor>& targets, F compute) {
  c10::Device device = targets.at(0).device();
  std::vector<Tensor> shadows;
  int64_t nbytes = 0;
  for (auto& target : targets) {
    shadows.push_back(shadow(target));
    nbytes += target.defined() ? static_cast<int64_t>(target.nbytes()) : 0;
  }
  // Inputs of such kernels are about as large as their results.
  issue_kernel(current_queue(device.index()), name, operations, targets[0].scalar_type(), 2 * nbytes,
               [shadows, compute] {
                 std::vector<Tensor> found = compute();
                 for (size_t k = 0; k < shadows.size(); k++)
                   if (shadows[k].defined() && found[k].defined()) shadows[k].copy_(found[k]);
               });
}

using Optional = std::optional<Tensor>;

inline Optional shadow(const Optional& tensor) {
  return tensor && tensor->defined() ? Optional(shadow(*tensor)) : std::nullopt;
}

}  // namespace simulated

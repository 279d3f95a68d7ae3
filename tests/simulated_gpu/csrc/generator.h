// Random numbers as CUDA draws them: a seed and an offset. The host moves the offset when it issues a job, so numbers
// depend on the order in which the host asks, never on when a stream runs.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <optional>

#include "common.h"

namespace simulated {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  DeviceGenerator* clone_impl() const override;

  // Moves the offset; a number from which all that one job draws follows.
  uint64_t draw();
  static DeviceGenerator& of(const std::optional<at::Generator>& given, int device);

 private:
  std::atomic<uint64_t> seed_{c10::default_rng_seed_val}, offset_{0};
};

const at::Generator& default_generator(int device);
// What a job draws from, given the number that was drawn for it.
at::Generator host_generator(uint64_t drawn);

}  // namespace simulated

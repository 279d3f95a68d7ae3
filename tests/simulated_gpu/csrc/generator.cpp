#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/Utils.h>

#include <cstring>

#include "queues.h"

namespace simulated {
namespace {

constexpr uint64_t kOffsetOfOneJob = 4;  // CUDA's offsets are multiples of four
constexpr int64_t kStateBytes = 2 * sizeof(uint64_t);

uint64_t mixed(uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

DeviceGenerator::DeviceGenerator(int device)
    : GeneratorImpl(c10::Device(kDevice, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(kKey)) {}

void DeviceGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t DeviceGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == kStateBytes, "RNG state is wrong size");
  uint64_t words[2];
  memcpy(words, state.data(), kStateBytes);
  seed_ = words[0];
  offset_ = words[1];
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  at::Tensor state = at::detail::empty_cpu({kStateBytes}, at::kByte, {}, {}, {}, {});
  uint64_t words[2] = {seed_, offset_};
  memcpy(state.mutable_data_ptr(), words, kStateBytes);
  return state.getIntrusivePtr();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* copy = new DeviceGenerator(device_.index());
  copy->seed_ = seed_.load();
  copy->offset_ = offset_.load();
  return copy;
}

uint64_t DeviceGenerator::draw() {
  uint64_t at = offset_.fetch_add(kOffsetOfOneJob);
  return mixed(mixed(seed_ + 0x9E3779B97F4A7C15ull) + at);
}

DeviceGenerator& DeviceGenerator::of(const std::optional<at::Generator>& given, int device) {
  const auto& found = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(found.device().type() == kDevice, "Expected a '", kDevice, "' device type for generator but found '",
              found.device().type(), "'");
  return *found.get<DeviceGenerator>();
}

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kMostDevices; index++) made->push_back(at::make_generator<DeviceGenerator>(index));
    return made;
  }();
  return (*all)[device_or_current(device)];
}

at::Generator host_generator(uint64_t drawn) {
  return at::detail::createCPUGenerator(drawn);
}

}  // namespace simulated

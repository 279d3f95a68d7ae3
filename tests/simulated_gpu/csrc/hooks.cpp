// How PyTorch finds the device: allocators, and what it calls hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "generator.h"
#include "knobs.h"
#include "memory.h"
#include "queues.h"
#include "tensors.h"

namespace simulated {

// Set while Python asks for the default generators: a new `torch.Generator(device)` is then the default one.
std::atomic<bool> gives_default_generators{false};

void register_operators();

namespace {

template <class Base>
struct HooksOf : Base {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(knob(kDevices)); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return pages_locked(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  c10::Device getDeviceFromPtr(void* address) const override {
    return {kDevice, static_cast<c10::DeviceIndex>(device_allocator().device_of(address))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    if (gives_default_generators) return default_generator(device);
    return at::make_generator<DeviceGenerator>(device_or_current(device));
  }
};

struct PrivateHooks : HooksOf<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto device = storage.device();
    c10::DeviceGuard guard(device);
    auto fresh = device_allocator().allocate(nbytes);
    size_t kept = std::min(nbytes, impl->nbytes());
    if (kept) device_allocator().copy_data(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

struct Hooks : HooksOf<at::CUDAHooksInterface> {
  explicit Hooks(at::CUDAHooksArgs = {}) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return static_cast<int>(knob(kDevices)); }
  c10::DeviceIndex current_device() const override { return this->getCurrentDevice(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device, "synchronize (device)"); }
};

}  // namespace

// Called once, after the knobs are set. False: PyTorch looked for CUDA before and did not find it.
bool register_device() {
  register_operators();
  c10::SetAllocator(kDevice, &device_allocator());
  at::setHostAllocator(kDevice, &host_allocator());
  if (kDevice == c10::DeviceType::PrivateUse1) {
    at::RegisterPrivateUse1HooksInterface(new PrivateHooks);
    return true;
  }
  return at::detail::getCUDAHooks().hasCUDA();
}

#ifdef SIMULATED_PRIVATE
namespace {

// A tensor may take over one of the CPU's as its data, as a tensor of CUDA may.
bool compatible(const Tensor&, const Tensor&) {
  return true;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", compatible);
}

}  // namespace
#endif

}  // namespace simulated

#ifndef SIMULATED_PRIVATE
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", simulated::Hooks);
}
#endif

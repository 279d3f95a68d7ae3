// What every file needs. PyTorch's tensors are in tensors.h: those headers take ten seconds.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

// As which device of PyTorch's: CUDA, or with this flag a backend of its own.
#ifdef SIMULATED_PRIVATE
#define SIMULATED_TYPE PrivateUse1
#else
#define SIMULATED_TYPE CUDA
#endif

namespace simulated {

constexpr c10::DeviceType kDevice = c10::DeviceType::SIMULATED_TYPE;
constexpr c10::DispatchKey kKey = c10::DispatchKey::SIMULATED_TYPE;
constexpr int kMostDevices = 8;

inline size_t rounded_up(size_t nbytes, size_t to) {
  return (nbytes + to - 1) / to * to;
}

}  // namespace simulated

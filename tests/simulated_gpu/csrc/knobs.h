// What can be asked of the simulated device, and what it counts. Python sets all knobs, from the environment or by hand.
#pragma once

#include "common.h"

namespace simulated {

enum Knob : int {
  kDevices,         // how many devices there are
  kMemory,          // bytes of each
  kLag,             // microseconds: each job waits for 0 to twice as long, at random
  kSeed,            // of the lags
  kPoison,          // 1: memory is filled with 0xFF when it is taken and when it is given back
  kCopyIn,          // microseconds for each MiB copied to the device: the stream's thread sleeps
  kCopyOut,         // the same from the device
  kWorkspace,       // bytes that the first matrix product of each (thread, stream) takes
  kExpandable,      // 1: what a tensor leaves of a block is always split off, as in expandable segments
  kExplain,         // 1: each synchronisation of the host is told to Python as it happens
  kKnobs
};

int64_t knob(Knob which);
void set_knob(Knob which, int64_t value);

enum Counter : int {
  kJobs,             // kernels and copies issued
  kSynchronisations,  // times that the host waited, or may have had to
  kCopiesIn,
  kCopiesOut,
  kCopiesWithin,     // on one device
  kCopiesBetween,    // of two devices
  kBlocked,          // microseconds that the host was blocked
  kCounters
};

void count(Counter which, int64_t by = 1);
int64_t counted(Counter which);

// The host waits for the device, on behalf of `who`: an operator or a call.
void count_synchronisation(const std::string& who);
// Names of those who made the host wait, a line each: name, tabulator, how often.
std::string synchronisations();

using Listener = void (*)(const char* who);
void listen(Listener listener);

}  // namespace simulated

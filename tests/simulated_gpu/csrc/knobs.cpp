#include "knobs.h"

namespace simulated {
namespace {

std::array<std::atomic<int64_t>, kKnobs> knobs{};
std::array<std::atomic<int64_t>, kCounters> counters{};
std::atomic<Listener> listener{nullptr};

// Never destroyed: threads of streams may still count while the process ends.
std::mutex& names_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

std::map<std::string, int64_t>& names() {
  static auto* all = new std::map<std::string, int64_t>;
  return *all;
}

}  // namespace

int64_t knob(Knob which) {
  return knobs[which].load(std::memory_order_relaxed);
}

void set_knob(Knob which, int64_t value) {
  knobs[which] = value;
}

void count(Counter which, int64_t by) {
  counters[which] += by;
}

int64_t counted(Counter which) {
  return counters[which];
}

void count_synchronisation(const std::string& who) {
  count(kSynchronisations);
  {
    std::lock_guard<std::mutex> held(names_lock());
    names()[who]++;
  }
  if (auto* told = listener.load(); told && knob(kExplain)) told(who.c_str());
}

std::string synchronisations() {
  std::lock_guard<std::mutex> held(names_lock());
  std::string lines;
  for (auto& [name, times] : names()) lines += name + "\t" + std::to_string(times) + "\n";
  return lines;
}

void listen(Listener to) {
  listener = to;
}

}  // namespace simulated

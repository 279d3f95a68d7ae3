#include "clock.h"

#include <iomanip>
#include <sstream>

#include "queues.h"

namespace simulated {

constexpr double kQuestion = 1e-6;

VirtualClock& virtual_clock() {
  static auto* one = new VirtualClock;
  return *one;
}

double Engine::place(double earliest, double seconds) {
  double start = earliest;
  auto next = busy_.upper_bound(start);
  if (next != busy_.begin()) start = std::max(start, std::prev(next)->second);
  while (next != busy_.end() && next->first < start + seconds) {
    start = std::max(start, next->second);
    ++next;
  }
  double end = start + seconds;
  if (next != busy_.begin() && std::prev(next)->second == start) {
    std::prev(next)->second = end;
  } else if (seconds > 0) {
    busy_[start] = end;
  }
  return start;
}

void Engine::forget_before(double moment) {
  while (!busy_.empty() && busy_.begin()->second < moment) busy_.erase(busy_.begin());
}

void VirtualClock::set(const Card* card) {
  std::lock_guard<std::mutex> held(lock_);
  if (card) card_ = *card;
  on_ = card != nullptr;
  setting_++;
  host_ = 0;
  engines_.clear();
  lanes_.clear();
  ran_.clear();
  for (int device = 0; device < kMostDevices; device++)
    for (auto* queue : queues_of(device)) queue->virtual_end = 0;
}

Engine& VirtualClock::engine(const std::string& name) {
  auto& found = engines_[name];
  found.forget_before(host_);  // no job starts before it is issued
  return found;
}

namespace {

std::string of_device(int device, const char* what) {
  return "cuda:" + std::to_string(device) + " " + what;
}

std::string lane_of(const Queue* queue) {
  return of_device(queue->device, "stream ") + std::to_string(queue->id);
}

}  // namespace

// `engine` may be empty: nothing is shared with other streams.
double VirtualClock::issue(Queue* queue, const std::string& with, const char* name, double seconds, int64_t nbytes) {
  host_ += card_.launch;
  double earliest = std::max(queue->virtual_end, host_);
  double start = with.empty() ? earliest : engine(with).place(earliest, seconds);
  queue->virtual_end = start + seconds;
  ran_.push_back({lane_of(queue), name, start, queue->virtual_end, nbytes});
  return queue->virtual_end;
}

void VirtualClock::kernel(Queue* queue, const char* name, double operations, c10::ScalarType dtype, int64_t nbytes) {
  if (!on()) return;
  std::lock_guard<std::mutex> held(lock_);
  size_t bits = 8 * c10::elementSize(dtype);
  double rate = bits <= 16 ? card_.half : bits <= 32 ? card_.single : card_.full;
  double seconds = card_.kernel + std::max(operations / rate, static_cast<double>(nbytes) / card_.memory);
  issue(queue, of_device(queue->device, "kernels"), name, seconds, nbytes);
}

void VirtualClock::sleep(Queue* queue, double seconds) {
  if (!on()) return;
  std::lock_guard<std::mutex> held(lock_);
  issue(queue, "", "sleep", seconds, 0);  // one thread of the card sleeps, the others are free
}

void VirtualClock::copy_in(Queue* queue, int64_t nbytes) {
  if (!on()) return;
  std::lock_guard<std::mutex> held(lock_);
  issue(queue, of_device(queue->device, "copies in"), "copy in", card_.copy + nbytes / card_.in, nbytes);
}

void VirtualClock::copy_out(Queue* queue, int64_t nbytes) {
  if (!on()) return;
  std::lock_guard<std::mutex> held(lock_);
  issue(queue, of_device(queue->device, "copies out"), "copy out", card_.copy + nbytes / card_.out, nbytes);
}

void VirtualClock::copy_between(Queue* source, Queue* target, int64_t nbytes) {
  if (!on()) return;
  std::lock_guard<std::mutex> held(lock_);
  source->virtual_end = std::max(source->virtual_end, target->virtual_end);
  std::string link = of_device(source->device, "to ") + std::to_string(target->device);
  target->virtual_end = issue(source, link, "copy between", card_.copy + nbytes / card_.peer, nbytes);
}

double VirtualClock::moment(Queue* queue) {
  std::lock_guard<std::mutex> held(lock_);
  return on() ? std::max(queue->virtual_end, host_) : 0;
}

void VirtualClock::hold(Queue* queue, double moment) {
  std::lock_guard<std::mutex> held(lock_);
  queue->virtual_end = std::max(queue->virtual_end, moment);
}

double VirtualClock::host() {
  std::lock_guard<std::mutex> held(lock_);
  return host_;
}

void VirtualClock::host_reaches(double moment) {
  std::lock_guard<std::mutex> held(lock_);
  host_ = std::max(host_, moment);
}

bool VirtualClock::host_asks_whether_past(double moment) {
  std::lock_guard<std::mutex> held(lock_);
  host_ += kQuestion;
  return host_ >= moment;
}

void VirtualClock::host_waits_for(Queue* queue) {
  std::lock_guard<std::mutex> held(lock_);
  host_ = std::max(host_, queue->virtual_end);
}

void VirtualClock::host_works(const std::string& name, double seconds) {
  std::lock_guard<std::mutex> held(lock_);
  ran_.push_back({"host", name, host_, host_ + seconds, 0});
  host_ += seconds;
}

double VirtualClock::lane(const std::string& lane, const std::string& name, double seconds, double earliest,
                          int64_t nbytes) {
  std::lock_guard<std::mutex> held(lock_);
  auto& free = lanes_[lane];
  double start = std::max({free, earliest, host_});  // the host asks for it now
  free = start + seconds;
  ran_.push_back({lane, name, start, free, nbytes});
  return free;
}

std::string VirtualClock::record() {
  std::lock_guard<std::mutex> held(lock_);
  std::ostringstream lines;
  lines << std::setprecision(17);
  for (auto& one : ran_)
    lines << one.lane << '\t' << one.name << '\t' << one.start << '\t' << one.end << '\t' << one.nbytes << '\n';
  return lines.str();
}

void VirtualClock::forget_record() {
  std::lock_guard<std::mutex> held(lock_);
  ran_.clear();
}

}  // namespace simulated

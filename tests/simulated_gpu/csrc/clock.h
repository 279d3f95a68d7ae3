// The virtual clock: what a run would take on a real card. All of it is computed when a job is issued, from shapes and a
// table, so that it is the same in every run; nobody sleeps. All times are seconds since the clock was set.
#pragma once

#include "common.h"

namespace simulated {

class Queue;

// What a card can do, as Python says it: seconds, bytes a second, operations a second.
struct Card {
  double launch;          // of the host: issuing a job
  double kernel;          // fixed part of each kernel
  double memory;          // bytes a second of the card's own memory
  double half, single, full;  // operations a second with 16, 32, 64 bits
  double copy;            // fixed part of each copy
  double in, out, peer;   // bytes a second to the card, from it, to another card
};

// One thing that ran.
struct Ran {
  std::string lane, name;
  double start, end;
  int64_t nbytes;
};

// What does one thing at a time. A job takes the first gap that is long enough: one that is issued early and must
// wait for an event does not keep others from running meanwhile.
class Engine {
 public:
  double place(double earliest, double seconds);
  void forget_before(double moment);

 private:
  std::map<double, double> busy_;  // start -> end
};

class VirtualClock {
 public:
  void set(const Card* card);  // null: off
  bool on() const { return on_.load(std::memory_order_relaxed); }
  uint64_t setting() const { return setting_.load(std::memory_order_relaxed); }  // how often it was set

  void kernel(Queue* queue, const char* name, double operations, c10::ScalarType dtype, int64_t nbytes);
  void sleep(Queue* queue, double seconds);
  void copy_in(Queue* queue, int64_t nbytes);
  void copy_out(Queue* queue, int64_t nbytes);
  void copy_between(Queue* source, Queue* target, int64_t nbytes);

  double moment(Queue* queue);               // when all that was issued to it has ended
  void hold(Queue* queue, double moment);    // what is issued later starts no earlier
  double host();
  void host_reaches(double moment);
  bool host_asks_whether_past(double moment);  // a question takes a microsecond
  void host_waits_for(Queue* queue);
  void host_works(const std::string& name, double seconds);  // of the program itself

  // Work of a lane of the host (an update, a disk): after its last work and not before `earliest`. Returns its end.
  double lane(const std::string& lane, const std::string& name, double seconds, double earliest, int64_t nbytes);
  // Lines of: lane, name, start, end, bytes, separated by tabulators.
  std::string record();
  void forget_record();

 private:
  double issue(Queue* queue, const std::string& engine, const char* name, double seconds, int64_t nbytes);
  Engine& engine(const std::string& name);

  std::atomic<bool> on_{false};
  std::atomic<uint64_t> setting_{0};
  std::mutex lock_;
  Card card_{};
  double host_ = 0;
  std::map<std::string, Engine> engines_;
  std::map<std::string, double> lanes_;
  std::vector<Ran> ran_;
};

VirtualClock& virtual_clock();

}  // namespace simulated

#include "knobs.h"
#include "memory.h"

namespace simulated {
namespace {

struct Workspaces {
  std::mutex lock;
  std::map<std::tuple<std::thread::id, int, int64_t>, c10::DataPtr> all;
};

Workspaces& workspaces() {
  static auto* one = new Workspaces;
  return *one;
}

}  // namespace

void take_workspace(int device) {
  int64_t nbytes = knob(kWorkspace);
  if (!nbytes) return;
  std::lock_guard<std::mutex> held(workspaces().lock);
  auto& place = workspaces().all[{std::this_thread::get_id(), device, current_stream(device)}];
  if (!place) place = device_allocator().allocate(nbytes);
}

void free_workspaces() {
  std::lock_guard<std::mutex> held(workspaces().lock);
  workspaces().all.clear();
}

}  // namespace simulated

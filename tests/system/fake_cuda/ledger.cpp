// The record of work, waits and violations. Python reads it through ctypes (runtime.py).
#include <vector>

#include "fake_cuda.h"

std::recursive_mutex global_lock;

namespace {
struct Entry {
  std::string name;
  size_t amount;
};
bool recording = false;
// never destroyed: PyTorch's threads may still call while the process ends
auto& entries = *new std::vector<Entry>;
auto& violations = *new std::vector<std::string>;
}  // namespace

void note(const std::string& name, size_t amount) { if (recording) entries.push_back({name, amount}); }

void host_waits(const char* how) { note(std::string("WAIT ") + how, 0); }

void violation(const std::string& what) {
  LOCK;
  violations.push_back(what);
}

extern "C" {
void fake_cuda_record(int on) {
  LOCK;
  recording = on;
  if (on) entries.clear();
}
size_t fake_cuda_entries() { return entries.size(); }
const char* fake_cuda_name(size_t i) { return entries[i].name.c_str(); }
size_t fake_cuda_amount(size_t i) { return entries[i].amount; }
size_t fake_cuda_violations() { return violations.size(); }
const char* fake_cuda_violation(size_t i) { return violations[i].c_str(); }
void fake_cuda_clear_violations() {
  LOCK;
  violations.clear();
}
}

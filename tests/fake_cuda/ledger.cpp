// What happened: work by name and stream, waits, and troubles. Python reads it through ctypes (runtime.py).
#include <vector>

#include "fake_cuda.h"

std::recursive_mutex everything;

namespace {
struct Entry {
  std::string name;
  bool captured;
  size_t amount;
};
bool recording = false;
// never destroyed: PyTorch's threads may still call while the process ends
auto& entries = *new std::vector<Entry>;
auto& troubles = *new std::vector<std::string>;
}  // namespace

void note(const std::string& name, bool captured, size_t amount) {
  if (recording) entries.push_back({name, captured, amount});
}

void host_waits(const char* how) { note(std::string("WAIT ") + how, false, 0); }

void trouble(const std::string& what) {
  LOCK;
  troubles.push_back(what);
}

extern "C" {
void stand_in_record(int on) {
  LOCK;
  recording = on;
  if (on) entries.clear();
}
size_t stand_in_entries() { return entries.size(); }
const char* stand_in_name(size_t i) { return entries[i].name.c_str(); }
int stand_in_captured(size_t i) { return entries[i].captured; }
size_t stand_in_amount(size_t i) { return entries[i].amount; }
size_t stand_in_troubles() { return troubles.size(); }
const char* stand_in_trouble(size_t i) { return troubles[i].c_str(); }
void stand_in_forget_troubles() {
  LOCK;
  troubles.clear();
}
}

#include "state.h"

#include <Python.h>
#include <unistd.h>

#include <ATen/record_function.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/node.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace neuron_emu {
namespace {

struct Site {
  std::string file;
  int line = 0;
  std::string function;
  bool operator<(const Site& other) const {
    return std::tie(file, line, function) < std::tie(other.file, other.line, other.function);
  }
};

std::mutex mutex;
std::unordered_map<std::string, int> modes;
std::map<std::tuple<std::string, std::string, Site>, uint64_t> table;
std::unordered_set<uint64_t> signatures;
std::vector<std::string> internal_folders;
std::vector<std::string> excepted_folders;
std::unordered_map<PyCodeObject*, bool> internal_code;  // guarded by the GIL
std::string deferred;
std::atomic<bool> has_deferred{false};
std::string started_by;
std::atomic<pid_t> started_pid{0};
std::atomic<bool> blocking{false};
std::atomic<double> delay{0.0};
thread_local int graph_depth = 0;

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

bool is_internal_file(const std::string& file) {
  if (file.empty() || file[0] == '<') {
    return file != "<stdin>" && file != "<string>";
  }
  for (const auto& folder : excepted_folders) {
    if (starts_with(file, folder)) {
      bool deeper = false;
      for (const auto& inside : internal_folders) {
        deeper = deeper || (inside.size() > folder.size() && starts_with(file, inside));
      }
      return deeper;
    }
  }
  for (const auto& folder : internal_folders) {
    if (starts_with(file, folder)) {
      return true;
    }
  }
  return false;
}

bool is_internal(PyCodeObject* code) {
  auto found = internal_code.find(code);
  if (found != internal_code.end()) {
    return found->second;
  }
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  bool internal = is_internal_file(file ? file : "");
  Py_INCREF(code);  // kept for good: a freed code object's address may be another's
  internal_code.emplace(code, internal);
  return internal;
}

// The innermost Python frame of this thread that is the user's. False when there is none.
bool python_site(Site& site) {
  if (!Py_IsInitialized()) {
    return false;
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  bool found = false;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_internal(code)) {
      site.file = PyUnicode_AsUTF8(code->co_filename);
      site.line = PyFrame_GetLineNumber(frame);
      site.function = PyUnicode_AsUTF8(code->co_name);
      found = true;
    }
    Py_DECREF(code);
    PyFrameObject* back = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyErr_Clear();
  PyGILState_Release(gil);
  return found;
}

// Lines of forward operators by the number that autograd gives their nodes. As many as a step has; older ones are lost.
struct Remembered {
  uint64_t thread = 0;
  uint64_t sequence = ~0ull;
  Site site;
};
constexpr size_t kRemembered = 1 << 14;
std::array<Remembered, kRemembered> remembered;
std::mutex remembered_mutex;

Site current_site() {
  Site site;
  auto node = torch::autograd::get_current_node();
  if (node) {
    std::lock_guard<std::mutex> lock(remembered_mutex);
    const auto& entry = remembered[node->sequence_nr() % kRemembered];
    if (entry.sequence == node->sequence_nr() && entry.thread == node->thread_id()) {
      site = entry.site;
      site.function += " (backward)";
      return site;
    }
  }
  if (python_site(site)) {
    return site;
  }
  site.file = node ? "(backward)" : "(no Python frame)";
  site.function = node ? node->name() : "";
  return site;
}

}  // namespace

void set_mode(const std::string& rule, int mode) {
  std::lock_guard<std::mutex> lock(mutex);
  modes[rule] = mode;
}

int mode_of(const char* rule) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = modes.find(rule);
  TORCH_CHECK(found != modes.end(), "neuron-emu: no rule '", rule, "' in strictness.py");
  return found->second;
}

namespace {
int count(const char* rule, const std::string& detail, uint64_t amount, Site& site) {
  int mode = mode_of(rule);
  if (mode != kOff) {
    site = current_site();
    std::lock_guard<std::mutex> lock(mutex);
    table[{rule, detail, site}] += amount;
  }
  return mode;
}
}  // namespace

int note(const char* rule, const std::string& detail, uint64_t amount) {
  Site site;
  return count(rule, detail, amount, site);
}

bool meet(
    const char* rule,
    const std::string& detail,
    uint64_t amount,
    const std::function<std::string()>& message) {
  Site site;
  int mode = count(rule, detail, amount, site);
  TORCH_CHECK(
      mode != kRefuse,
      message ? message() : detail,
      "\n  at ", site.file, ":", site.line, site.function.empty() ? "" : " in ", site.function,
      "\n  (emulated neuron device; rule '", rule, "'. neuron_emu.relax('", rule, "') lifts it, and "
      "neuron_emu.RULES says where it comes from.)");
  return mode != kOff;
}

std::vector<Count> counts() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Count> result;
  for (const auto& [key, amount] : table) {
    const auto& [rule, detail, site] = key;
    result.push_back({rule, detail, site.file, site.line, site.function, amount});
  }
  return result;
}

void reset_counts() {
  std::lock_guard<std::mutex> lock(mutex);
  table.clear();
}

void set_internal_folders(std::vector<std::string> internal, std::vector<std::string> excepted) {
  internal_folders = std::move(internal);
  excepted_folders = std::move(excepted);
  internal_code.clear();
}

bool called_from(const char* file_name) {
  if (!Py_IsInitialized()) {
    return false;
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  bool found = false;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    std::string path = file ? file : "";
    std::string name = file_name;
    found = path.size() >= name.size() && path.compare(path.size() - name.size(), name.size(), name) == 0;
    Py_DECREF(code);
    PyFrameObject* back = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyErr_Clear();
  PyGILState_Release(gil);
  return found;
}

void remember_forward_site() {
  if (!c10::GradMode::is_enabled() || torch::autograd::get_current_node()) {
    return;
  }
  Site site;
  if (!python_site(site)) {
    return;
  }
  uint64_t next = at::sequence_number::peek();
  if (next == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(remembered_mutex);
  remembered[(next - 1) % kRemembered] = {at::RecordFunction::currentThreadId(), next - 1, std::move(site)};
}

void enter_graph() {
  ++graph_depth;
}
void exit_graph() {
  --graph_depth;
}
bool in_graph() {
  return graph_depth > 0;
}

void new_signature(const std::string& name, uint64_t key) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!signatures.insert(key).second) {
      return;
    }
  }
  if (meet("new-signature", name)) {
    compile_delay();
  }
}

void set_compile_delay(double seconds) {
  delay = seconds;
}

void compile_delay() {
  double seconds = delay;
  if (seconds > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
}

void defer_error(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (deferred.empty()) {
    deferred = text;
    has_deferred = true;
  }
}

void raise_deferred() {
  if (!has_deferred) {
    return;
  }
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex);
    text.swap(deferred);
    has_deferred = false;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

void start_runtime(const char* by) {
  pid_t pid = getpid();
  pid_t started = started_pid;
  if (started == pid) {
    return;
  }
  if (started != 0) {
    meet("forked-after-start", by, 1, [] {
      return "The neuron runtime was started before this process was forked, and does not survive a fork. "
             "Start ranks with the spawn method, or touch the device in the child alone.";
    });
  }
  std::lock_guard<std::mutex> lock(mutex);
  started_pid = pid;
  started_by = by;
}

std::string runtime_started_by() {
  std::lock_guard<std::mutex> lock(mutex);
  return started_pid == getpid() ? started_by : "";
}

void set_launch_blocking(bool value) {
  blocking = value;
}
bool launch_blocking() {
  return blocking;
}

}  // namespace neuron_emu

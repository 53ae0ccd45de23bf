// What a run is allowed to do (rules) and what it did (counters), with the line of Python that did it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace neuron_emu {

// What happens when a rule is met. The numbers are strictness.py's.
enum Mode : int { kOff = 0, kCount = 1, kRefuse = 2 };

// One count: which rule, of what, on which line, how often.
struct Count {
  std::string rule;
  std::string detail;
  std::string file;
  int line;
  std::string function;
  uint64_t amount;
};

void set_mode(const std::string& rule, int mode);
int mode_of(const char* rule);

// Counts a meeting of `rule` at the current line; throws what `message` says, when the rule refuses.
// A message is asked for only then. Returns whether the rule is on.
bool meet(
    const char* rule,
    const std::string& detail,
    uint64_t amount = 1,
    const std::function<std::string()>& message = nullptr);

// Counts, and never throws. Returns the rule's mode.
int note(const char* rule, const std::string& detail, uint64_t amount = 1);

std::vector<Count> counts();
void reset_counts();

// Folders whose frames are never the line that is meant: torch, this package, Python's library.
void set_internal_folders(std::vector<std::string> internal, std::vector<std::string> excepted);

// Whether a frame of this thread is of a file of that name: torch prints tensors in float64, which is no one's doing.
bool called_from(const char* file_name);

// Remembers the line of a forward operator, so that what its backward does is reported there.
void remember_forward_site();

// While a compiled graph runs, its operators are parts of one program, and are not counted one by one.
void enter_graph();
void exit_graph();
bool in_graph();

// A new (operator, shapes, dtypes): counted once per process, and as slow as a compilation when a delay is set.
void new_signature(const std::string& name, uint64_t key);
void set_compile_delay(double seconds);
void compile_delay();

// Errors that a device reports at its next synchronisation.
void defer_error(const std::string& text);
void raise_deferred();

// The runtime of a process: started by the first thing that touches the device.
void start_runtime(const char* by);
std::string runtime_started_by();  // "" before
void set_launch_blocking(bool blocking);
bool launch_blocking();

}  // namespace neuron_emu

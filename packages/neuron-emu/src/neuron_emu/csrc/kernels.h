// Operators on the device: each runs as CPU's kernel on the same bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace neuron_emu {

// What is particular about an operator; operators.py holds the table.
enum Kind : int {
  kArithmetic = 1,      // int64 results are those of 32-bit arithmetic
  kSort = 2,            // sorts on the host
  kBoundsChecked = 4,   // waits for the host to compare indices with bounds
  kRandom = 8,          // draws from the CPU generator
  kDataDependent = 16,  // its result's shape is known on the host alone
  kMetadata = 32,       // touches no data
  kGroupedMm = 64,
  kHostRoundTrip = 128,
  kRemembered = 256,       // what its backward does is reported on its forward's line
  kHostIndices = 512,      // takes indices that lie on the host
};

// A CPU tensor on the bytes of a device tensor, and a device tensor on the bytes of a CPU tensor.
at::Tensor cpu_view(const at::Tensor& device);
at::Tensor device_view(const at::Tensor& cpu, const c10::Storage& storage);

// `registered`: the full names of operators that have a kernel of their own; all others fall back to CPU.
// `kinds`: packet name ("aten::sort") -> Kind bits.
void register_operators(const std::vector<std::string>& registered, std::unordered_map<std::string, int> kinds);

}  // namespace neuron_emu

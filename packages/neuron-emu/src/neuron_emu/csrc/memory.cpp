#include "memory.h"

#include <sys/mman.h>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device.h"
#include "state.h"

namespace neuron_emu {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

std::mutex memory_mutex;
std::array<DeviceStats, kMaxDevices> stats;
size_t bytes_per_core = 24ull << 30;

// ---- addresses that nothing may read ----

constexpr size_t kReserved = 8ull << 40;  // of 128 TiB; reserved addresses take no memory
char* reserved = nullptr;
size_t used = 0;
std::unordered_map<size_t, std::vector<void*>> free_addresses;

size_t rounded(size_t bytes) {
  constexpr size_t kUnit = 512;
  constexpr size_t kLarge = 1 << 20;
  size_t unit = bytes < kLarge ? kUnit : kLarge;
  return std::max(kUnit, (bytes + unit - 1) / unit * unit);
}

void* take_address(size_t bytes) {
  auto& list = free_addresses[bytes];
  if (!list.empty()) {
    void* address = list.back();
    list.pop_back();
    return address;
  }
  if (!reserved) {
    void* range = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "neuron-emu: the system gives no address range for the emulated device");
    reserved = static_cast<char*>(range);
  }
  TORCH_CHECK(used + bytes <= kReserved, "neuron-emu: out of addresses for the emulated device");
  void* address = reserved + used;
  used += bytes;
  return address;
}

// ---- statistics: reserved stays 0, active is what is taken, as torch-neuronx's own are ----

template <typename F>
void each(DeviceStats& s, F f) {
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  f(s.allocated_bytes[all]);
  f(s.active_bytes[all]);
  f(s.requested_bytes[all]);
}

std::string too_much(size_t bytes, size_t taken) {
  return c10::str(
      "neuron (emulated) out of memory. Tried to allocate ", bytes, " bytes; ", taken, " of ", bytes_per_core,
      " bytes of this logical core are taken.");
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto& s = stats[block->device];
  each(s, [&](auto& stat) { stat.decrease(block->bytes); });
  s.allocation[0].decrease(1);
  s.active[0].decrease(1);
  s.num_device_free += 1;
  free_addresses[block->address_bytes].push_back(block->address);
}

// Refuses, or defers, or lets pass, what does not fit in the core.
void check_room(size_t bytes, c10::DeviceIndex device, bool by_operator) {
  size_t taken = 0;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    taken = stats[device].active_bytes[0].current;
    if (taken + bytes <= bytes_per_core) {
      return;
    }
    stats[device].num_ooms += 1;
  }
  if (note("out-of-memory", by_operator ? "an operator's result" : "an allocation") != kRefuse) {
    return;
  }
  auto text = too_much(bytes, taken);
  // An allocation by itself cannot wait for the next synchronisation: the host may have no such memory either.
  if (by_operator && !launch_blocking() && note("deferred-error", "out of memory") != kOff) {
    defer_error(text);
    return;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

c10::DataPtr make_pointer(c10::Storage cpu, c10::DeviceIndex device) {
  start_runtime("an allocation");
  auto block = std::make_unique<Block>();
  size_t bytes = cpu.nbytes();
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto& s = stats[device];
  each(s, [&](auto& stat) { stat.increase(bytes); });
  s.allocation[0].increase(1);
  s.active[0].increase(1);
  s.num_device_alloc += 1;
  block->bytes = bytes;
  block->device = device;
  block->address_bytes = rounded(bytes);
  block->address = take_address(block->address_bytes);
  block->cpu = std::move(cpu);
  void* address = bytes == 0 ? nullptr : block->address;
  return {address, block.release(), &free_block, c10::Device(kNeuron, device)};
}

c10::Storage new_cpu_storage(size_t bytes) {
  auto* cpu = c10::GetAllocator(c10::DeviceType::CPU);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), cpu->allocate(bytes), cpu, /*resizable=*/true);
}

struct EmulatedAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    check_room(bytes, device, /*by_operator=*/false);
    return make_pointer(new_cpu_storage(bytes), device);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "neuron (emulated): raw copies of device memory by pointer are not possible");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return stats.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto& s = stats.at(device);
    each(s, [](auto& stat) { stat.reset_accumulated(); });
    s.allocation[0].reset_accumulated();
    s.active[0].reset_accumulated();
    s.num_ooms = s.num_alloc_retries = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto& s = stats.at(device);
    each(s, [](auto& stat) { stat.reset_peak(); });
    s.allocation[0].reset_peak();
    s.active[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    size_t taken = stats.at(device).active_bytes[0].current;
    return {taken > bytes_per_core ? 0 : bytes_per_core - taken, bytes_per_core};
  }
};

EmulatedAllocator the_allocator;
struct Register {
  Register() {
    c10::SetAllocator(kNeuron, &the_allocator);
  }
} registered;

// ---- pinned host memory: plain memory that is known to be pinned ----

std::unordered_set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    if (pointer) {
      std::lock_guard<std::mutex> lock(memory_mutex);
      pinned.insert(pointer);
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* pointer) {
    if (pointer) {
      {
        std::lock_guard<std::mutex> lock(memory_mutex);
        pinned.erase(pointer);
      }
      c10::free_cpu(pointer);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
PinnedAllocator the_pinned_allocator;

Block* block_of(const c10::Storage& device) {
  auto* block = static_cast<Block*>(device.data_ptr().get_context());
  TORCH_CHECK(block, "neuron (emulated): this storage was not made by the emulated device");
  return block;
}

}  // namespace

c10::Storage device_storage(c10::Storage cpu, c10::DeviceIndex device, bool by_operator) {
  auto bytes = static_cast<int64_t>(cpu.nbytes());
  check_room(bytes, device, by_operator);
  auto pointer = make_pointer(std::move(cpu), device);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), &the_allocator, /*resizable=*/true);
}

const c10::Storage& cpu_storage(const c10::Storage& device) {
  return block_of(device)->cpu;
}

void resize_storage(const c10::Storage& device, size_t bytes) {
  Block* block = block_of(device);
  auto fresh = new_cpu_storage(bytes);
  size_t kept = std::min(bytes, block->cpu.nbytes());
  if (kept > 0) {
    std::memcpy(fresh.mutable_data(), block->cpu.data(), kept);
  }
  auto index = block->device;
  auto* impl = device.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap({});  // the old bytes are free before the new ones are taken, as resize_(0) means it
  check_room(bytes, index, /*by_operator=*/false);
  impl->set_data_ptr_noswap(make_pointer(std::move(fresh), index));
  impl->set_nbytes(bytes);
}

void adopt_cpu_size(const c10::Storage& device) {
  Block* block = block_of(device);
  if (block->cpu.nbytes() == block->bytes) {
    return;
  }
  auto cpu = block->cpu;
  auto index = block->device;
  auto* impl = device.unsafeGetStorageImpl();
  impl->set_nbytes(cpu.nbytes());
  impl->set_data_ptr_noswap({});
  check_room(cpu.nbytes(), index, /*by_operator=*/true);
  impl->set_data_ptr_noswap(make_pointer(std::move(cpu), index));
}

c10::DeviceAllocator* allocator() {
  return &the_allocator;
}
c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return pinned.count(pointer) > 0;
}
void set_capacity(size_t bytes) {
  bytes_per_core = bytes;
}
size_t capacity() {
  return bytes_per_core;
}

}  // namespace neuron_emu

// Device memory: what a tensor's pointer says, where its bytes are, and how much of a core is taken.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

namespace neuron_emu {

constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;

// A device storage's bytes. Its data pointer is an address in a reserved range that nothing may read: host code that
// follows it stops there. The bytes are those of `cpu`, which operators work on.
struct Block {
  c10::Storage cpu;
  size_t bytes;
  c10::DeviceIndex device;
  void* address;
  size_t address_bytes;
};

// The device storage of these bytes; what it takes is counted until it is freed. `by_operator` says that an operator
// made it, whose failure a device reports at its next synchronisation.
c10::Storage device_storage(c10::Storage cpu, c10::DeviceIndex device, bool by_operator);

// The CPU storage behind a device storage.
const c10::Storage& cpu_storage(const c10::Storage& device);

// Gives `device` another size, and keeps what fits.
void resize_storage(const c10::Storage& device, size_t bytes);
// Says that an operator gave the CPU storage behind `device` another size.
void adopt_cpu_size(const c10::Storage& device);

c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

void set_capacity(size_t bytes_per_core);
size_t capacity();

}  // namespace neuron_emu

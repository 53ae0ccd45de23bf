// The device itself: indices, streams, events, its generator, and PyTorch's hooks.
#pragma once

#include <c10/core/Device.h>

namespace neuron_emu {

constexpr int kMaxDevices = 128;  // logical cores of a trn2.48xlarge at LNC=1

// Cores [first, first + count) are this process's, of `total` that torch.neuron.device_count() says.
void set_devices(int first, int count, int total);
int device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
void check_device(c10::DeviceIndex device);

// Waits for the device: counts it, and raises what the device has to report.
void synchronize(const char* what);

// True once after the generator's state was set, until the next draw asks.
bool take_generator_touched();

}  // namespace neuron_emu

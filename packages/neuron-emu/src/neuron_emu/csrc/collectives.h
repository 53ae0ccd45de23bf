// The process group: gloo on the bytes of device tensors, with the limits that torch-neuronx's group has.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace neuron_emu {

// `gloo` moves the data, `world` is the size of the default group, and `is_default` says that this group is it.
c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Backend>& gloo, int world, bool is_default);

}  // namespace neuron_emu

#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "device.h"
#include "memory.h"
#include "state.h"

namespace neuron_emu {
namespace {

struct OpInfo {
  std::string name;
  int kinds = 0;
  uint64_t hash = 0;
};

std::unordered_map<std::string, int> packet_kinds;

std::string packet_of(const std::string& name) {
  bool in_place = name.size() > 2 && name.back() == '_' && name[name.size() - 2] != '_';
  return in_place ? name.substr(0, name.size() - 1) : name;
}

const OpInfo& info_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, std::unique_ptr<OpInfo>> known;
  const auto& schema = op.schema();
  auto& entry = known[&schema];
  if (!entry) {
    entry = std::make_unique<OpInfo>();
    entry->name = schema.name();
    auto found = packet_kinds.find(packet_of(schema.name()));
    entry->kinds = found == packet_kinds.end() ? 0 : found->second;
    entry->hash = std::hash<std::string>()(schema.name() + "." + schema.overload_name());
  }
  return *entry;
}

bool on_neuron(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNeuron;
}

void refuse_float64(at::ScalarType dtype, const std::string& by) {
  if ((dtype == at::kDouble || dtype == at::kComplexDouble) && !called_from("_tensor_str.py")) {
    meet("float64", by, 1, [&] {
      return by + " makes a 64-bit floating point tensor; the device computes with at most 32 bits. Use float32.";
    });
  }
}

// ---- one call of an operator ----

struct Argument {
  at::Tensor device;  // as the caller gave it
  at::Tensor cpu;     // the same bytes
  bool written;
};

struct Call {
  c10::SmallVector<Argument, 6> tensors;
  c10::DeviceIndex device = -1;
  uint64_t signature;
  const at::Tensor* on_host = nullptr;
};

at::Tensor take(Call& call, const at::Tensor& tensor, bool written, const OpInfo& info) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (!on_neuron(tensor)) {
    // A scalar may come from the host, as it may with every device.
    if (tensor.dim() > 0 && !((info.kinds & kHostIndices) && at::isIntegralType(tensor.scalar_type(), true))) {
      call.on_host = &tensor;
    }
    return tensor;
  }
  auto index = tensor.device().index();
  if (call.device >= 0 && call.device != index) {
    meet("mixed-devices", info.name, 1, [&] {
      return c10::str(
          info.name, ": Expected all tensors to be on the same device, but found at least two, neuron:",
          static_cast<int>(call.device), " and neuron:", static_cast<int>(index), ".");
    });
  }
  call.device = index;
  for (auto size : tensor.sizes()) {
    call.signature = call.signature * 1000003u ^ static_cast<uint64_t>(size);
  }
  call.signature = call.signature * 1000003u ^ (static_cast<uint64_t>(tensor.scalar_type()) + 0x9e3779b97f4a7c15u);
  auto cpu = cpu_view(tensor);
  call.tensors.push_back({tensor, cpu, written});
  return cpu;
}

void take_all(Call& call, const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpInfo& info) {
  const auto& arguments = op.schema().arguments();
  size_t begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = arguments[i].alias_info();
    bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = take(call, value.toTensor(), written, info);
      }
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> cpu;
      cpu.reserve(list.size());
      for (const at::Tensor& tensor : list) {
        cpu.push_back(take(call, tensor, written, info));
      }
      value = std::move(cpu);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList();
      c10::List<std::optional<at::Tensor>> cpu;
      cpu.reserve(list.size());
      for (const std::optional<at::Tensor>& tensor : list) {
        cpu.push_back(
            tensor.has_value() ? std::optional<at::Tensor>(take(call, *tensor, written, info)) : std::nullopt);
      }
      value = std::move(cpu);
    } else if (value.isDevice() && value.toDevice().type() == kNeuron) {
      auto device = value.toDevice();
      if (call.device < 0) {
        call.device = device.has_index() ? device.index() : current_device();
      }
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().defined() &&
               value.toGenerator().device().type() == kNeuron) {
      meet("device-generator", info.name, 1, [&] {
        return info.name + ": no operator draws from a neuron generator; pass a CPU generator, or none.";
      });
      value = c10::IValue();
    }
  }
  if (call.on_host && call.device >= 0) {
    meet("mixed-devices", info.name, 1, [&] {
      return c10::str(
          info.name, ": Expected all tensors to be on the same device, but found at least two, neuron:",
          static_cast<int>(call.device), " and cpu. The tensor on cpu has shape ", call.on_host->sizes(), " and dtype ",
          call.on_host->scalar_type(), "; move it with .to('neuron').");
    });
  }
  if (call.device < 0) {
    call.device = current_device();
  }
}

// 64-bit results of 32-bit arithmetic: the low half, with its sign.
void wrap_to_32_bits(const at::Tensor& cpu, const OpInfo& info) {
  if (mode_of("int64-wraps") == kOff) {
    return;
  }
  int64_t changed = 0;
  if (cpu.is_contiguous()) {
    auto* data = cpu.data_ptr<int64_t>();
    for (int64_t i = 0; i < cpu.numel(); ++i) {
      auto low = static_cast<int64_t>(static_cast<int32_t>(static_cast<uint64_t>(data[i])));
      changed += low != data[i];
      data[i] = low;
    }
  } else {
    auto low = cpu.to(at::kInt).to(at::kLong);
    changed = low.ne(cpu).sum().item<int64_t>();
    if (changed) {
      cpu.copy_(low);
    }
  }
  if (changed) {
    meet("int64-wraps", info.name, changed, [&] {
      return c10::str(
          info.name, ": ", changed, " int64 results do not fit in 32 bits; the device's arithmetic on integers has 32. ",
          "Sum on the host, or in float32.");
    });
  }
}

void poison(const at::Tensor& cpu) {
  if (cpu.is_floating_point()) {
    cpu.fill_(std::numeric_limits<float>::quiet_NaN());
  } else if (cpu.scalar_type() == at::kBool) {
    cpu.fill_(true);
  } else {
    cpu.fill_(0x55);
  }
}

bool is_out_of_range(const c10::Error& error) {
  std::string text = error.what_without_backtrace();
  return text.find("out of bounds") != std::string::npos || text.find("out of range") != std::string::npos;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// Without bounds checks a device reads or writes somewhere: here the whole result is poison.
bool run_unchecked(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpInfo& info) {
  const auto& arguments = op.schema().arguments();
  size_t begin = stack->size() - arguments.size();
  torch::jit::Stack copy(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  try {
    run_on_cpu(op, stack);
    return false;
  } catch (const c10::Error& error) {
    if (!is_out_of_range(error)) {
      throw;
    }
  }
  stack->resize(begin);
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = copy[i];
    if (arguments[i].name() == "index" && value.isTensor()) {
      value = at::zeros_like(value.toTensor());
    } else if (arguments[i].name() == "indices" && value.isTensor()) {
      value = at::zeros_like(value.toTensor());
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> zeros;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        zeros.push_back(tensor.has_value() ? std::optional<at::Tensor>(at::zeros_like(*tensor)) : std::nullopt);
      }
      value = std::move(zeros);
    }
    stack->push_back(value);
  }
  run_on_cpu(op, stack);
  meet("out-of-range-index", info.name);
  return true;
}

void check_grouped_mm(const torch::jit::Stack* stack, size_t begin) {
  const auto& a = (*stack)[begin].toTensor();
  const auto& b = (*stack)[begin + 1].toTensor();
  constexpr int64_t kRows = 128;
  bool shapes = a.dim() == 2 && (b.dim() == 2 || b.dim() == 3);
  int64_t grouped = a.dim() == 2 && b.dim() == 2 ? a.size(1) : a.size(0);
  std::string found;
  if (!shapes) {
    found = c10::str("operands of ", a.dim(), " and ", b.dim(), " dimensions (only 2 x 2 and 2 x 3 are there)");
  } else if (grouped % kRows) {
    found = c10::str(grouped, " rows");
  } else if ((*stack)[begin + 2].isTensor()) {
    auto offsets = (*stack)[begin + 2].toTensor().to(at::kLong).contiguous();
    for (int64_t i = 0; i < offsets.numel(); ++i) {
      auto offset = offsets.data_ptr<int64_t>()[i];
      if (offset % kRows) {
        found = c10::str("an offset of ", offset);
        break;
      }
    }
  }
  if (!found.empty() && note("grouped-mm-blocks", found) == kRefuse) {
    TORCH_CHECK_VALUE(
        false, "_grouped_mm on neuron (emulated): found ", found,
        "; rows and every offset have to be multiples of 128. Pad each expert's rows to blocks of 128. "
        "(rule 'grouped-mm-blocks')");
  }
  if (shapes && b.dim() == 3) {
    auto matrix = static_cast<uint64_t>(b.size(1) * b.size(2)) * b.element_size();
    note("grouped-mm-copy", "bytes of expert matrices copied, one a block of 128 rows", grouped / kRows * matrix);
  }
}

bool skips_preconditions() {
  const char* value = std::getenv("TORCH_NEURONX_SKIP_OP_PRECONDITIONS");
  return value && std::strcmp(value, "1") == 0;
}

void count_kinds(const c10::OperatorHandle& op, const OpInfo& info, bool registered) {
  if (in_graph()) {
    return;
  }
  int kinds = info.kinds;
  if (!registered && !(kinds & kMetadata)) {
    remember_forward_site();
    meet("cpu-fallback", info.name, 1, [&] {
      return info.name + " has no kernel on neuron: it runs on the CPU, with copies there and back, and a wait.";
    });
  }
  if (kinds == 0) {
    return;
  }
  if (kinds & kRemembered) {
    remember_forward_site();
  }
  if (kinds & kSort) {
    meet("host-round-trip", info.name, 1, [&] {
      return info.name + " goes device -> host -> device. Find positions by comparison and cumsum instead.";
    });
  }
  if (kinds & kHostRoundTrip) {
    meet("select-backward", info.name, 1, [&] { return info.name + " goes over the host."; });
  }
  if (kinds & kDataDependent) {
    meet("host-wait", info.name, 1, [&] { return info.name + " waits for the host: its result's shape depends on data."; });
  }
  if (kinds & kRandom) {
    meet("random-draw", info.name, 1, [&] { return info.name + " draws from the CPU generator."; });
    if (take_generator_touched()) {
      meet("generator-ignored", info.name, 1, [&] {
        return info.name +
            ": the neuron generator's state was set before this draw, which reads the CPU generator alone. Ranks that "
            "count on it draw copies of each other.";
      });
    }
  }
}

void push_results(Call& call, const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpInfo& info, bool poisoned) {
  const auto& schema = op.schema();
  const auto& returns = schema.returns();
  size_t begin = stack->size() - returns.size();

  for (auto& argument : call.tensors) {
    if (!argument.written) {
      continue;
    }
    if (poisoned) {
      poison(argument.cpu);
    }
    if ((info.kinds & kArithmetic) && argument.cpu.scalar_type() == at::kLong) {
      wrap_to_32_bits(argument.cpu, info);
    }
    adopt_cpu_size(argument.device.storage());
    auto* impl = argument.device.unsafeGetTensorImpl();
    if (argument.cpu.sizes() != argument.device.sizes() || argument.cpu.strides() != argument.device.strides()) {
      impl->set_sizes_and_strides(argument.cpu.sizes(), argument.cpu.strides());
    }
  }

  auto to_device = [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) {
      return result;
    }
    auto* storage = result.storage().unsafeGetStorageImpl();
    for (auto& argument : call.tensors) {
      if (argument.cpu.storage().unsafeGetStorageImpl() == storage) {
        return device_view(result, argument.device.storage());
      }
    }
    refuse_float64(result.scalar_type(), info.name);
    if (poisoned) {
      poison(result);
    }
    if ((info.kinds & kArithmetic) && result.scalar_type() == at::kLong) {
      wrap_to_32_bits(result, info);
    }
    return device_view(result, device_storage(result.storage(), call.device, /*by_operator=*/true));
  };

  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = returns[i].alias_info();
    if (value.isTensor()) {
      at::Tensor result = value.toTensor();
      if (alias && alias->isWrite()) {
        for (auto& argument : call.tensors) {
          if (argument.cpu.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) {
            value = argument.device;
            break;
          }
        }
      } else {
        value = to_device(result);
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& result : value.toTensorList()) {
        list.push_back(to_device(result));
      }
      value = std::move(list);
    }
  }
}

void call_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool registered) {
  const auto& info = info_of(op);
  Call call;
  call.signature = info.hash;
  take_all(call, op, stack, info);
  check_device(call.device);
  count_kinds(op, info, registered);
  if (registered && !in_graph() && !(info.kinds & kMetadata)) {
    new_signature(info.name, call.signature);
  }
  if (info.kinds & kGroupedMm) {
    check_grouped_mm(stack, stack->size() - op.schema().arguments().size());
  }
  bool poisoned = false;
  if (info.kinds & kBoundsChecked) {
    if (in_graph() || skips_preconditions()) {
      poisoned = run_unchecked(op, stack, info);
    } else {
      meet("bounds-check", info.name, 2, [&] {
        return info.name + " waits twice for the host, for its bounds check. Set TORCH_NEURONX_SKIP_OP_PRECONDITIONS=1.";
      });
      run_on_cpu(op, stack);
    }
  } else {
    run_on_cpu(op, stack);
  }
  push_results(call, op, stack, info, poisoned);
}

void registered_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_operator(op, stack, true);
}
void unregistered_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_operator(op, stack, false);
}

// ---- what allocates, copies and reads ----

c10::DeviceIndex factory_device(std::optional<at::Device> device) {
  auto index = device.has_value() && device->has_index() ? device->index() : current_device();
  check_device(index);
  return index;
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kNeuron, factory_device(device)));
  auto type = c10::dtype_or_default(dtype);
  refuse_float64(type, "an allocation");
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(kNeuron, factory_device(device)));
  auto type = c10::dtype_or_default(dtype);
  refuse_float64(type, "an allocation");
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

at::Tensor cpu_or_view(const at::Tensor& tensor) {
  return on_neuron(tensor) ? cpu_view(tensor) : tensor;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  bool to_host = on_neuron(self) && !on_neuron(to);
  if (to_host && !in_graph()) {
    bool waits = !(non_blocking && is_pinned(to.storage().data()));
    if (waits) {
      meet("host-wait", "copy to host", 1, [] { return "A copy to the host waits for the device."; });
      raise_deferred();
    }
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  cpu_or_view(to).copy_(cpu_or_view(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) {
    to.resize_(self.sizes());
  }
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (!in_graph()) {
    meet("host-wait", "item", 1, [] { return "Reading a value of a tensor waits for the device."; });
  }
  raise_deferred();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return cpu_view(self).item();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device().type() == kNeuron, "set_: a neuron tensor takes a neuron storage, found one on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_empty(at::Tensor& self) {
  auto fresh = at::empty({0}, self.options());
  return set_tensor(self, fresh);
}

void record_stream(at::Tensor&, at::Stream) {}

at::Tensor select(const at::Tensor& self, int64_t dim, c10::SymInt index) {
  remember_forward_site();
  return at::native::select_symint(self, dim, std::move(index));
}

}  // namespace

at::Tensor cpu_view(const at::Tensor& device) {
  auto* impl = device.unsafeGetTensorImpl();
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(cpu_storage(device.storage())), c10::DispatchKeySet(c10::DispatchKey::CPU), impl->dtype());
  auto* view = cpu.unsafeGetTensorImpl();
  view->set_storage_offset(impl->storage_offset());
  view->set_sizes_and_strides(impl->sizes(), impl->strides());
  if (impl->is_wrapped_number()) {
    view->set_wrapped_number(true);
  }
  return cpu;
}

at::Tensor device_view(const at::Tensor& cpu, const c10::Storage& storage) {
  auto* impl = cpu.unsafeGetTensorImpl();
  auto device = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), impl->dtype());
  auto* view = device.unsafeGetTensorImpl();
  view->set_storage_offset(impl->storage_offset());
  view->set_sizes_and_strides(impl->sizes(), impl->strides());
  return device;
}

void register_operators(const std::vector<std::string>& registered, std::unordered_map<std::string, int> kinds) {
  static std::unique_ptr<torch::Library> library;
  TORCH_CHECK(!library, "neuron-emu: operators are registered already");
  packet_kinds = std::move(kinds);
  library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : registered) {
    // What takes a device as an argument may make a tensor elsewhere: composites of empty and copy do that right.
    auto dot = name.find('.');
    auto op = c10::Dispatcher::singleton().findSchema(
        {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    const auto& arguments = op->schema().arguments();
    if (std::any_of(arguments.begin(), arguments.end(), [](const auto& a) { return a.name() == "device"; })) {
      continue;
    }
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&registered_operator>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&unregistered_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("select.int", TORCH_FN(select));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

}  // namespace neuron_emu

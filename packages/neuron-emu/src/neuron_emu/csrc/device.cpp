#include "device.h"

#include <ATen/Context.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/Functions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstring>

#include "memory.h"
#include "state.h"

namespace neuron_emu {
namespace {

std::atomic<int> first_device{0};
std::atomic<int> own_devices{1};
std::atomic<int> all_devices{1};
std::atomic<int> default_device{0};
thread_local int thread_device = -1;
std::atomic<bool> generator_touched{false};

// ---- streams and events: everything has happened when a call returns, so they only keep names apart ----

constexpr int kStreams = 32;
std::atomic<int> next_stream{0};
thread_local std::array<c10::StreamId, kMaxDevices> thread_streams{};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNeuron;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNeuron, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kNeuron, current_device()};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      thread_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, thread_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kNeuron, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, index_of(device)), 1 + next_stream++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& mine = thread_streams[index_of(stream.device())];
    auto before = mine;
    mine = stream.id();
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), before);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new c10::StreamId(stream.id());
    }
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::StreamId*>(event);
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    synchronize("Stream.synchronize");
  }
  void synchronizeEvent(void*) const override {
    synchronize("Event.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize("synchronize");
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    meet("event-elapsed-time", "Event.elapsed_time", 1, [] {
      return "Event.elapsed_time is not there on neuron: take times on the host, around torch.neuron.synchronize().";
    });
    return 0.0;
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- the generator: 16 bytes of state (seed, offset) that no operator reads ----

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kNeuron, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
    generator_touched = true;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.dtype() == at::kByte && state.device().is_cpu() && state.is_contiguous(),
        "a neuron generator's state is 16 contiguous bytes on CPU, found ", state.numel(), " of ", state.dtype().name(),
        " on ", state.device());
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
    generator_touched = true;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(state.data_ptr<uint8_t>() + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() {
    return kNeuron;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return !runtime_started_by().empty();
  }
  // torch calls this before set_device too, which starts nothing: what touches memory does.
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static std::array<at::Generator, kMaxDevices> generators;
    if (device < 0) {
      device = current_device();
    }
    TORCH_CHECK(device < kMaxDevices, "neuron has no device ", static_cast<int>(device));
    if (!generators[device].defined()) {
      generators[device] = make_generator(device);
    }
    return generators[device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_generator(device);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kNeuron, current_device()};
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct RegisterHooks {
  RegisterHooks() {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} register_hooks;

}  // namespace

void set_devices(int first, int count, int total) {
  TORCH_CHECK(total <= kMaxDevices, "at most ", kMaxDevices, " cores can be emulated, asked for ", total);
  first_device = first;
  own_devices = count;
  all_devices = total;
  default_device = first;
  thread_device = -1;
}

int device_count() {
  return all_devices;
}

c10::DeviceIndex current_device() {
  return static_cast<c10::DeviceIndex>(thread_device >= 0 ? thread_device : default_device.load());
}

void check_device(c10::DeviceIndex device) {
  int first = first_device;
  int count = own_devices;
  if (device >= first && device < first + count) {
    return;
  }
  meet("device-index", "neuron:" + std::to_string(device), 1, [&] {
    return c10::str(
        "neuron:", static_cast<int>(device), " is not this process's: it has ", count, " core(s), from neuron:", first,
        ". A rank's device is neuron:<LOCAL_RANK>.");
  });
  TORCH_CHECK(device >= 0 && device < kMaxDevices, "there is no neuron:", static_cast<int>(device));
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  auto before = current_device();
  if (device >= 0 && device != before) {
    check_device(device);
    thread_device = device;
  }
  return before;
}

void synchronize(const char* what) {
  if (!in_graph()) {
    meet("host-wait", what);
  }
  raise_deferred();
}

bool take_generator_touched() {
  return generator_touched.exchange(false);
}

}  // namespace neuron_emu

// What Python calls.
#include <torch/extension.h>
#include <pybind11/chrono.h>

#include "collectives.h"
#include "device.h"
#include "kernels.h"
#include "memory.h"
#include "state.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace neuron_emu;
  m.def("set_mode", &set_mode);
  m.def("note", [](const std::string& rule, const std::string& detail, uint64_t amount) {
    return note(rule.c_str(), detail, amount);
  }, py::arg("rule"), py::arg("detail"), py::arg("amount") = 1);
  m.def("meet", [](const std::string& rule, const std::string& detail, const std::string& message) {
    return meet(rule.c_str(), detail, 1, [&] { return message; });
  });
  m.def("counts", [] {
    py::list rows;
    for (const auto& c : counts()) {
      rows.append(py::make_tuple(c.rule, c.detail, c.file, c.line, c.function, c.amount));
    }
    return rows;
  });
  m.def("reset_counts", &reset_counts);
  m.def("set_internal_folders", &set_internal_folders);
  m.def("set_compile_delay", &set_compile_delay);
  m.def("compile_delay", &compile_delay, py::call_guard<py::gil_scoped_release>());
  m.def("set_launch_blocking", &set_launch_blocking);
  m.def("start_runtime", [](const std::string& by) { start_runtime(by.c_str()); });
  m.def("runtime_started_by", &runtime_started_by);

  m.def("set_devices", &set_devices);
  m.def("device_count", &device_count);
  m.def("set_capacity", &set_capacity);
  m.def("capacity", &capacity);
  m.def("register_operators", &register_operators);
  m.def("default_generator", [](int device) {
    return at::globalContext().getAcceleratorHooksInterface(kNeuron).getDefaultGenerator(
        static_cast<c10::DeviceIndex>(device));
  });
  m.def("make_process_group", &make_process_group, py::call_guard<py::gil_scoped_release>());
  m.def("cpu_view", &cpu_view);
  m.def("new_signature", &new_signature);
  m.def("enter_graph", &enter_graph);
  m.def("exit_graph", &exit_graph);
}

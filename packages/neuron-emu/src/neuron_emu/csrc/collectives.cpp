#include "collectives.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>

#include "kernels.h"
#include "memory.h"
#include "state.h"

namespace neuron_emu {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor on_cpu(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kNeuron, "a neuron process group takes neuron tensors, found one on ", tensor.device(),
      ". Use a gloo group for tensors on the host.");
  return cpu_view(tensor);
}

Tensors on_cpu(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(on_cpu(tensor));
  }
  return result;
}

std::vector<Tensors> on_cpu(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const auto& list : lists) {
    result.push_back(on_cpu(list));
  }
  return result;
}

// gloo's work, plus what comes after it (a mean's division), once; its results are the device's tensors.
class EmulatedWork final : public c10d::Work {
 public:
  EmulatedWork(WorkPtr inner, Tensors results, std::function<void()> after = nullptr)
      : inner_(std::move(inner)), results_(std::move(results)), after_(std::move(after)) {}
  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = inner_->wait(timeout);
    finish_once();
    return done;
  }
  void abort() override {
    inner_->abort();
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    auto self = c10::intrusive_ptr<EmulatedWork>::reclaim_copy(this);
    inner_->getFuture()->addCallback([future, self](c10::ivalue::Future& inner) {
      if (inner.hasError()) {
        future->setError(inner.exception_ptr());
        return;
      }
      self->finish_once();
      future->markCompleted(c10::IValue(self->results_));
    });
    return future;
  }

 private:
  void finish_once() {
    std::call_once(once_, [&] {
      if (after_) {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        after_();
      }
    });
  }
  WorkPtr inner_;
  Tensors results_;
  std::function<void()> after_;
  std::once_flag once_;
};

// A reduction that gloo lacks, as one that it has: factors before, and a division after.
struct Reduction {
  c10d::ReduceOp op;
  std::function<void(Tensors&)> before;
  std::function<void(Tensors&)> after;
};

Reduction as_gloo(const c10d::ReduceOp& op, int size) {
  if (op.op_ == c10d::ReduceOp::AVG) {
    return {c10d::ReduceOp::SUM, nullptr, [size](Tensors& results) {
              for (auto& tensor : results) {
                tensor.div_(size);
              }
            }};
  }
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    auto supplement = c10::static_intrusive_pointer_cast<c10d::PreMulSumSupplement>(op.supplement_);
    return {c10d::ReduceOp::SUM,
            [supplement](Tensors& inputs) {
              for (auto& tensor : inputs) {
                // A copy: a reduce-scatter's input is the caller's.
                tensor = supplement->tensor_factor.defined() ? tensor * supplement->tensor_factor.cpu()
                                                             : tensor * supplement->double_factor;
              }
            },
            nullptr};
  }
  return {op, nullptr, nullptr};
}

class ProcessGroupNeuron final : public c10d::Backend {
 public:
  ProcessGroupNeuron(
      c10::intrusive_ptr<c10d::Backend> gloo, int world, bool is_default)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), is_default_(is_default) {
    int size = size_;
    if (world % size) {
      meet("group-size", std::to_string(size) + " of " + std::to_string(world), 1, [&] {
        return c10::str("A neuron group has ", size, " ranks, which do not divide the world's ", world, ".");
      });
    }
  }

  const std::string getBackendName() const override {
    return "neuron";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  bool supportsCoalescing() const override {
    return false;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto cpu = started("broadcast", tensors);
    return done(gloo_->broadcast(cpu, opts), tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto cpu = started("all_reduce", tensors);
    auto targets = cpu;
    auto reduction = as_gloo(opts.reduceOp, size_);
    auto plain = opts;
    plain.reduceOp = reduction.op;
    if (reduction.before) {
      reduction.before(cpu);
    }
    auto work = gloo_->allreduce(cpu, plain);
    return done(std::move(work), tensors, [reduction, cpu, targets]() mutable {
      for (size_t i = 0; i < targets.size(); ++i) {
        if (!targets[i].is_same(cpu[i])) {
          targets[i].copy_(cpu[i]);
        }
      }
      if (reduction.after) {
        reduction.after(targets);
      }
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    WorkPtr last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last = allreduce(one, opts);
      last->wait();
    }
    return last;
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto cpu = started("reduce", tensors);
    auto targets = cpu;
    auto reduction = as_gloo(opts.reduceOp, size_);
    auto plain = opts;
    plain.reduceOp = reduction.op;
    if (reduction.before) {
      reduction.before(cpu);
    }
    bool root = rank_ == opts.rootRank;
    return done(gloo_->reduce(cpu, plain), tensors, [=]() mutable {
      if (root && !targets[0].is_same(cpu[0])) {
        targets[0].copy_(cpu[0]);
      }
      if (root && reduction.after) {
        reduction.after(targets);
      }
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto cpu = started("all_gather", inputs);
    auto results = on_cpu(outputs);
    return done(gloo_->allgather(results, cpu, opts), outputs.at(0));
  }
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto cpu = started("all_gather", {input})[0];
    auto result = on_cpu(output);
    return done(gloo_->all_gather_single(result, cpu, opts), {output});
  }
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    WorkPtr last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      last = all_gather_single(outputs[i], inputs[i], opts);
      last->wait();
    }
    return last;
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto flat = at::cat(on_cpu(inputs.at(0)));
    return reduce_flat(outputs.at(0), flat, opts);
  }
  WorkPtr reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return reduce_flat(output, on_cpu(input), opts);
  }
  WorkPtr reduce_scatter_single_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    WorkPtr last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      last = reduce_scatter_single(outputs[i], inputs[i], opts);
      last->wait();
    }
    return last;
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto cpu = started("gather", inputs);
    auto results = on_cpu(outputs);
    return done(gloo_->gather(results, cpu, opts), outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto cpu = started("scatter", outputs);
    auto sources = on_cpu(inputs);
    return done(gloo_->scatter(cpu, sources, opts), outputs);
  }

  WorkPtr all_to_all_single(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    check_splits("output", output_splits);
    check_splits("input", input_splits);
    count_pair();
    auto cpu = started("all_to_all", {input})[0];
    auto result = on_cpu(output);
    return done(gloo_->all_to_all_single(result, cpu, output_splits, input_splits, opts), {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    for (const auto& list : {inputs, outputs}) {
      for (const auto& tensor : list) {
        if (tensor.sizes() != inputs.at(0).sizes()) {
          meet("all-to-all-splits", "all_to_all of unequal tensors", 1, [&] {
            return c10::str(
                "all_to_all on neuron takes tensors of one shape, found ", inputs.at(0).sizes(), " and ", tensor.sizes(),
                ". Pad each part to the same number of rows.");
          });
        }
      }
    }
    count_pair();
    auto cpu = started("all_to_all", inputs);
    auto send = cpu[0].numel() ? at::cat(cpu) : cpu[0];
    std::vector<int64_t> out_rows, in_rows;
    for (size_t i = 0; i < inputs.size(); ++i) {
      in_rows.push_back(inputs[i].size(0));
      out_rows.push_back(outputs[i].size(0));
    }
    auto results = on_cpu(outputs);
    auto received = at::empty_like(at::cat(results));
    auto work = gloo_->all_to_all_single(received, send, out_rows, in_rows, opts);
    return done(std::move(work), outputs, [received, results]() mutable {
      int64_t row = 0;
      for (auto& result : results) {
        result.copy_(received.narrow(0, row, result.size(0)));
        row += result.size(0);
      }
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    refuse_point_to_point("send");
    auto cpu = started("send", tensors);
    return done(gloo_->send(cpu, to, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    refuse_point_to_point("recv");
    auto cpu = started("recv", tensors);
    return done(gloo_->recv(cpu, from, tag), tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    if (!is_default_) {
      meet("barrier-on-subgroup", "barrier", 1, [] {
        return "barrier is there for the default group alone, and this is another. Use an all_reduce of one element.";
      });
    }
    raise_deferred();
    c10d::BarrierOptions plain;
    plain.timeout = opts.timeout;
    return gloo_->barrier(plain);
  }

 private:
  Tensors started(const char* what, const Tensors& tensors) {
    if (!in_graph()) {
      uint64_t key = std::hash<std::string>()(what) ^ static_cast<uint64_t>(size_);
      for (const auto& tensor : tensors) {
        for (auto size : tensor.sizes()) {
          key = key * 1000003u ^ static_cast<uint64_t>(size);
        }
        key = key * 1000003u ^ (static_cast<uint64_t>(tensor.scalar_type()) + 0x9e3779b97f4a7c15u);
      }
      new_signature(std::string("c10d::") + what, key);
    }
    return on_cpu(tensors);
  }
  static WorkPtr done(WorkPtr work, const Tensors& results, std::function<void()> after = nullptr) {
    return c10::make_intrusive<EmulatedWork>(std::move(work), results, std::move(after));
  }

  WorkPtr reduce_flat(at::Tensor& output, at::Tensor input, const c10d::ReduceScatterOptions& opts) {
    started("reduce_scatter", {output});
    auto result = on_cpu(output);
    auto reduction = as_gloo(opts.reduceOp, size_);
    auto plain = opts;
    plain.reduceOp = reduction.op;
    if (reduction.before) {
      Tensors inputs{input};
      reduction.before(inputs);
      input = inputs[0];
    }
    return done(gloo_->reduce_scatter_single(result, input, plain), {output}, [reduction, result] {
      if (reduction.after) {
        Tensors results{result};
        reduction.after(results);
      }
    });
  }

  void check_splits(const char* which, const std::vector<int64_t>& splits) const {
    bool ones = std::all_of(splits.begin(), splits.end(), [](int64_t split) { return split == 1; });
    if (ones) {
      return;
    }
    meet("all-to-all-splits", "all_to_all_single", 1, [&] {
      return c10::str(
          "all_to_all_single on neuron takes no split sizes (or ones), found ", which, " splits [", c10::Join(", ", splits),
          "]. Pad each part to the same number of rows, and pass no splits.");
    });
  }
  void count_pair() const {
    if (size_ == 2) {
      meet("two-rank-all-to-all", "all_to_all of 2 ranks");
    }
  }
  static void refuse_point_to_point(const char* what) {
    meet("point-to-point", what, 1, [&] {
      return std::string(what) + " is not there on neuron (seen so in April 2026); pipelines need it.";
    });
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool is_default_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Backend>& gloo, int world, bool is_default) {
  return c10::make_intrusive<ProcessGroupNeuron>(gloo, world, is_default);
}

}  // namespace neuron_emu

// Fused attention: CPU's flash kernel where CPU itself takes it, and a count where the device has no fused kernel.
#include <ATen/ATen.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include "kernels.h"
#include "memory.h"
#include "state.h"

namespace neuron_emu {
namespace {

// Why the device's fused kernel does not take these; "" when it does.
std::string why_slow(
    const at::Tensor& query, const at::Tensor& key, const std::optional<at::Tensor>& mask, double dropout) {
  if (mask.has_value() && mask->defined()) {
    return "a mask";
  }
  if (dropout != 0.0) {
    return "dropout";
  }
  if (query.dim() != 4) {
    return c10::str(query.dim(), " dimensions");
  }
  if (query.size(2) % 128) {
    return c10::str("query length ", query.size(2), ", no multiple of 128");
  }
  if (key.size(2) % 512) {
    return c10::str("key length ", key.size(2), ", no multiple of 512");
  }
  if (query.size(3) > 128) {
    return c10::str("head dimension ", query.size(3), ", over 128");
  }
  return "";
}

std::optional<at::Tensor> cpu_mask(const std::optional<at::Tensor>& mask) {
  return mask.has_value() && mask->defined() ? std::optional<at::Tensor>(cpu_view(*mask)) : std::nullopt;
}

int64_t choose(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  auto slow = why_slow(query, key, mask, dropout);
  if (!slow.empty() && !in_graph()) {
    meet("slow-attention", slow, 1, [&] {
      return "scaled_dot_product_attention with " + slow + " has no fused kernel on neuron.";
    });
  }
  auto view = [](const at::Tensor& t) {
    auto cpu = cpu_view(t);
    return t.requires_grad() ? cpu.requires_grad_(true) : cpu;
  };
  auto on_cpu = at::_fused_sdp_choice(view(query), view(key), view(value), cpu_mask(mask), dropout, causal, scale, grouped);
  return static_cast<int64_t>(
      on_cpu == static_cast<int64_t>(sdp::SDPBackend::flash_attention) ? sdp::SDPBackend::overrideable
                                                                       : sdp::SDPBackend::math);
}

using Forward = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

at::Tensor to_device(const at::Tensor& cpu, const at::Tensor& like) {
  return device_view(cpu, device_storage(cpu.storage(), like.device().index(), /*by_operator=*/true));
}

Forward forward(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    bool,
    std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      cpu_view(query), cpu_view(key), cpu_view(value), dropout, causal, cpu_mask(mask), scale);
  auto nothing = at::empty({0}, query.options());
  return {
      to_device(out, query), to_device(logsumexp, query), nothing, nothing, query.sym_size(2), key.sym_size(2), nothing,
      nothing, nothing};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    std::array<bool, 4>,
    const at::Tensor& out,
    const at::Tensor& logsumexp,
    const at::Tensor&,
    const at::Tensor&,
    c10::SymInt,
    c10::SymInt,
    double dropout,
    bool causal,
    const at::Tensor&,
    const at::Tensor&,
    std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::optional<at::Tensor> given = mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      cpu_view(grad), cpu_view(query), cpu_view(key), cpu_view(value), cpu_view(out), cpu_view(logsumexp), dropout, causal,
      cpu_mask(given), scale);
  return {to_device(dq, query), to_device(dk, query), to_device(dv, query), at::Tensor()};
}

}  // namespace

int64_t choose_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  return choose(query, key, value, mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(forward));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(backward));
}

}  // namespace neuron_emu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &neuron_emu::choose_attention)
}

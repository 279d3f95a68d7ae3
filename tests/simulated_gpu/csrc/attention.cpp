// Flash and memory-efficient attention: no matrix of all pairs is kept, backward computes it again, and dropout draws the
// same numbers again from the number that forward drew.
#include <ATen/Context.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include <cmath>

#include "fused.h"
#include "generator.h"

namespace simulated {
namespace {

constexpr int64_t kRowsAligned = 32;  // of the statistics that efficient attention keeps

// Inputs as the stream's thread sees them, and what does not change between the passes. Tensors are (batch, heads,
// length, width).
struct Attention {
  Tensor query, key, value;
  Optional bias;
  double scale, dropout;
  bool causal;

  static Attention of(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& bias, double dropout, bool causal,
                      std::optional<double> scale) {
    double used = scale ? *scale : 1 / std::sqrt(static_cast<double>(q.size(-1)));
    return {shadow(q), shadow(k), shadow(v), shadow(bias), used, dropout, causal};
  }

  at::ScalarType wide() const { return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

  // Of several queries' heads that share one of the keys.
  Tensor spread(const Tensor& tensor) const {
    return tensor.to(wide()).repeat_interleave(query.size(1) / tensor.size(1), 1);
  }
  Tensor gathered(const Tensor& grad, const Tensor& like) const {
    if (grad.size(1) == like.size(1)) return grad;
    return grad.unflatten(1, {like.size(1), grad.size(1) / like.size(1)}).sum(2);
  }

  Tensor scores() const {
    auto found = at::matmul(query.to(wide()), spread(key).transpose(-2, -1)) * scale;
    if (bias) found = found + *bias;
    if (causal) {
      auto seen = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
      found = found.masked_fill(seen.logical_not(), -INFINITY);
    }
    return found;
  }
  // One where a pair is kept, enlarged by what the dropped ones would have given.
  Optional kept(uint64_t drawn) const {
    if (dropout == 0) return std::nullopt;
    auto mask = at::empty({query.size(0), query.size(1), query.size(-2), key.size(-2)}, at::dtype(wide()));
    return mask.bernoulli_(1 - dropout, host_generator(drawn)).div_(1 - dropout);
  }

  // A row that sees nothing gives zeros.
  static Tensor probabilities(const Tensor& scores, const Tensor& statistics) {
    auto shown = (scores - statistics.unsqueeze(-1)).exp();
    return shown.masked_fill(statistics.isneginf().unsqueeze(-1), 0);
  }

  std::vector<Tensor> forward(uint64_t drawn) const {
    auto all = scores();
    auto statistics = at::logsumexp(all, {-1});
    auto weights = probabilities(all, statistics);
    if (auto mask = kept(drawn)) weights = weights * *mask;
    return {at::matmul(weights, spread(value)), statistics};
  }

  std::vector<Tensor> backward(const Tensor& grad, const Tensor& result, const Tensor& statistics, uint64_t drawn) const {
    auto wide_grad = grad.to(wide());
    auto weights = probabilities(scores(), statistics.narrow(-1, 0, query.size(-2)).to(wide()));
    auto of_weights = at::matmul(wide_grad, spread(value).transpose(-2, -1));
    auto used = weights;
    if (auto mask = kept(drawn)) {
      used = weights * *mask;
      of_weights = of_weights * *mask;
    }
    auto rows = (wide_grad * result.to(wide())).sum(-1, true);
    auto of_scores = weights * (of_weights - rows);
    auto of_key = at::matmul(of_scores.transpose(-2, -1), query.to(wide())) * scale;
    auto of_value = at::matmul(used.transpose(-2, -1), wide_grad);
    auto of_bias = bias ? of_scores.sum_to_size(bias->sizes()) : Tensor();
    return {at::matmul(of_scores, spread(key)) * scale, gathered(of_key, key), gathered(of_value, value), of_bias};
  }
};

double pairs_operations(const Tensor& q, const Tensor& k, int products, bool causal) {
  double all = 2.0 * products * static_cast<double>(q.numel()) * static_cast<double>(k.size(-2));
  return causal ? all / 2 : all;
}

// The kernels write (batch, length, heads, width) and show it transposed.
Tensor new_result(const Tensor& q, const Tensor& v) {
  return at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
}

uint64_t drawn_for(const Tensor& q, double dropout) {
  return dropout == 0 ? 0 : DeviceGenerator::of(std::nullopt, q.get_device()).draw();
}

// --------------------------------------------------------------------------------------------------------------- flash

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool debug,
    std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  TORCH_CHECK(!debug, "simulated GPU: flash attention returns no debug mask");
  auto result = new_result(q, v);
  auto statistics = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  auto state = at::empty({2}, q.options().dtype(at::kUInt64)), unused = at::empty({}, q.options().dtype(at::kUInt64));
  uint64_t drawn = drawn_for(q, dropout);
  auto attention = Attention::of(q, k, v, {}, dropout, causal, scale);
  issue_fused("aten::_scaled_dot_product_flash_attention", pairs_operations(q, k, 2, causal), {result, statistics, state},
              [attention, drawn]() -> std::vector<Tensor> {
                auto found = attention.forward(drawn);
                auto numbers = at::zeros({2}, at::kUInt64);
                numbers.mutable_data_ptr<uint64_t>()[0] = drawn;
                return {found[0], found[1], numbers};
              });
  return {result, statistics, Tensor(), Tensor(), q.size(2), k.size(2), state, unused, at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& result, const Tensor& statistics, const Tensor&,
                                                  const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
                                                  const Tensor& state, const Tensor&, std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  auto gq = at::empty_like(q), gk = at::empty_like(k), gv = at::empty_like(v);
  auto attention = Attention::of(q, k, v, {}, dropout, causal, scale);
  issue_fused("aten::_scaled_dot_product_flash_attention_backward", pairs_operations(q, k, 5, causal), {gq, gk, gv},
              [attention, g = shadow(grad), r = shadow(result), s = shadow(statistics), n = shadow(state)] {
                return attention.backward(g, r, s, n.const_data_ptr<uint64_t>()[0]);
              });
  return {gq, gk, gv};
}

// ----------------------------------------------------------------------------------------------------------- efficient

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const Optional& bias, bool keeps_statistics, double dropout,
                                                     bool causal, std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  auto result = new_result(q, v);
  int64_t rows = keeps_statistics ? static_cast<int64_t>(rounded_up(q.size(2), kRowsAligned)) : 0;
  auto statistics = at::empty({q.size(0), q.size(1), rows}, q.options().dtype(at::kFloat));
  uint64_t drawn = drawn_for(q, dropout);
  auto attention = Attention::of(q, k, v, bias, dropout, causal, scale);
  auto kept = keeps_statistics ? statistics.narrow(-1, 0, q.size(2)) : Tensor();
  issue_fused("aten::_scaled_dot_product_efficient_attention", pairs_operations(q, k, 2, causal), {result, kept},
              [attention, drawn] { return attention.forward(drawn); });
  // As on CUDA, these two lie on the host: it knows them when it issues the kernel.
  auto seed = at::scalar_tensor(static_cast<int64_t>(drawn), at::kLong), offset = at::scalar_tensor(0, at::kLong);
  return {result, statistics, seed, offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& result,
    const Tensor& statistics, const Tensor& seed, const Tensor&, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  if (!grad.defined()) return {};
  c10::DeviceGuard guard(q.device());
  auto gq = at::empty_like(q), gk = at::empty_like(k), gv = at::empty_like(v);
  auto gb = wanted[3] && bias.defined() ? at::empty(bias.sizes(), bias.options()) : Tensor();
  uint64_t drawn = static_cast<uint64_t>(seed.item<int64_t>());
  auto attention = Attention::of(q, k, v, bias, dropout, causal, scale);
  issue_fused("aten::_scaled_dot_product_efficient_attention_backward", pairs_operations(q, k, 5, causal),
              {gq, gk, gv, gb}, [attention, drawn, g = shadow(grad), r = shadow(result), s = shadow(statistics)] {
                return attention.backward(g, r, s, drawn);
              });
  return {gq, gk, gv, gb};
}

// ------------------------------------------------------------------------------------------------------- which of them

// As CUDA chooses: flash for 16 bits without a mask, else efficient, else the composition of products and softmax.
int64_t choice(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, double, bool causal,
               std::optional<double>, bool grouped) {
  const auto& context = at::globalContext();
  bool masked = mask && mask->defined();
  bool dense = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.scalar_type() == k.scalar_type();
  bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  bool same_widths = q.size(-1) == k.size(-1) && q.size(-1) == v.size(-1);
  bool unequal = causal && q.size(-2) != k.size(-2);
  if (dense && half && !masked && same_widths && !unequal && q.size(-1) <= 256 && context.userEnabledFlashSDP())
    return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  bool single = q.scalar_type() == at::kFloat || half;
  if (dense && single && !grouped && !(masked && causal) && context.userEnabledMemEfficientSDP())
    return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, SIMULATED_TYPE, m) {
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  m.impl("_fused_sdp_choice", choice);
}

}  // namespace
}  // namespace simulated

#ifndef SIMULATED_PRIVATE
// PyTorch asks through this table, not through the dispatcher.
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &simulated::choice)
}
#endif

// Cells of LSTM and GRU. PyTorch asks for them one step at a time where there is no cuDNN.
#include "fused.h"

namespace simulated {
namespace {

Tensor with_biases(const Tensor& input, const Tensor& hidden, const Optional& input_bias, const Optional& hidden_bias) {
  auto gates = input + hidden;
  if (input_bias) gates = gates + *input_bias + *hidden_bias;
  return gates;
}

Tensor derived_sigmoid(const Tensor& grad, const Tensor& result) {
  return grad * result * (1 - result);
}

Tensor derived_tanh(const Tensor& grad, const Tensor& result) {
  return grad * (1 - result * result);
}

// ---- LSTM: gates are input, forget, cell, output

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                             const Optional& input_bias, const Optional& hidden_bias) {
  c10::DeviceGuard guard(input.device());
  auto hy = at::empty_like(cx, at::MemoryFormat::Contiguous), cy = at::empty_like(cx, at::MemoryFormat::Contiguous);
  auto workspace = at::empty_like(input, at::MemoryFormat::Contiguous);
  auto compute = [i = shadow(input), h = shadow(hidden), c = shadow(cx), bi = shadow(input_bias),
                  bh = shadow(hidden_bias)]() -> std::vector<Tensor> {
    auto gates = with_biases(i, h, bi, bh).chunk(4, 1);
    auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
    auto next = forget * c + in * cell;
    return {out * next.tanh(), next, at::cat({in, forget, cell, out}, 1)};
  };
  issue_fused("aten::_thnn_fused_lstm_cell", 0, {hy, cy, workspace}, compute);
  return {hy, cy, workspace};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& grad_hy, const Optional& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace, bool has_bias) {
  if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
  c10::DeviceGuard guard(cx.device());
  auto grad_gates = at::empty_like(workspace), grad_cx = at::empty_like(cx);
  auto compute = [gh = shadow(grad_hy), gc = shadow(grad_cy), c = shadow(cx), next = shadow(cy),
                  w = shadow(workspace)]() -> std::vector<Tensor> {
    auto gates = w.chunk(4, 1);
    auto tanh = next.tanh();
    auto hy = gh ? *gh : at::zeros_like(next);
    auto cell = derived_tanh(hy * gates[3], tanh);
    if (gc) cell = cell + *gc;
    auto all = at::cat({derived_sigmoid(cell * gates[2], gates[0]), derived_sigmoid(cell * c, gates[1]),
                        derived_tanh(cell * gates[0], gates[2]), derived_sigmoid(hy * tanh, gates[3])}, 1);
    return {all, cell * gates[1]};
  };
  issue_fused("aten::_thnn_fused_lstm_cell_backward_impl", 0, {grad_gates, grad_cx}, compute);
  return {grad_gates, grad_cx, has_bias ? grad_gates.sum(0) : Tensor()};
}

// ---- GRU: gates are reset, update, new; its workspace holds them, the old state, and the hidden part of the new gate

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const Optional& input_bias, const Optional& hidden_bias) {
  c10::DeviceGuard guard(input.device());
  auto hy = at::empty_like(hx, at::MemoryFormat::Contiguous);
  auto workspace = at::empty({hx.size(0), hx.size(1) * 5}, hx.options());
  auto compute = [i = shadow(input), h = shadow(hidden), old = shadow(hx), bi = shadow(input_bias),
                  bh = shadow(hidden_bias)]() -> std::vector<Tensor> {
    auto of_input = (bi ? i + *bi : i).chunk(3, 1), of_hidden = (bh ? h + *bh : h).chunk(3, 1);
    auto reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
    auto fresh = (of_input[2] + reset * of_hidden[2]).tanh();
    return {fresh + update * (old - fresh), at::cat({reset, update, fresh, old, of_hidden[2]}, 1)};
  };
  issue_fused("aten::_thnn_fused_gru_cell", 0, {hy, workspace}, compute);
  return {hy, workspace};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  c10::DeviceGuard guard(grad_hy.device());
  int64_t batch = workspace.size(0), width = workspace.size(1) / 5;
  auto grad_input = at::empty({batch, 3 * width}, workspace.options());
  auto grad_hidden = at::empty_like(grad_input), grad_hx = at::empty_like(grad_hy, at::MemoryFormat::Contiguous);
  auto compute = [g = shadow(grad_hy), w = shadow(workspace)]() -> std::vector<Tensor> {
    auto parts = w.chunk(5, 1);
    auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &old = parts[3], &of_hidden = parts[4];
    auto of_update = derived_sigmoid(g * (old - fresh), update);
    auto of_fresh = derived_tanh(g * (1 - update), fresh);
    auto of_reset = derived_sigmoid(of_fresh * of_hidden, reset);
    return {at::cat({of_reset, of_update, of_fresh}, 1), at::cat({of_reset, of_update, of_fresh * reset}, 1), g * update};
  };
  issue_fused("aten::_thnn_fused_gru_cell_backward", 0, {grad_input, grad_hidden, grad_hx}, compute);
  if (!has_bias) return {grad_input, grad_hidden, grad_hx, Tensor(), Tensor()};
  return {grad_input, grad_hidden, grad_hx, grad_input.sum(0), grad_hidden.sum(0)};
}

TORCH_LIBRARY_IMPL(aten, SIMULATED_TYPE, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
}  // namespace simulated

// What torch calls do not show: tensors come back with nodes of autograd, are written into, or are read past torch.
#include <torch/extension.h>

using torch::Tensor;

struct Square : public torch::autograd::Function<Square> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, Tensor x) {
    ctx->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    return {2 * gradients[0] * ctx->get_saved_variables()[0]};
  }
};

Tensor square(Tensor x) { return Square::apply(x); }

Tensor twice(Tensor x) { return 2 * x; }

void add_one(Tensor x) {
  torch::NoGradGuard none;
  x.add_(1);
}

Tensor past_torch(Tensor x) {
  Tensor y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++) y.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i];
  return y;
}

PYBIND11_MODULE(extension, m) {
  m.def("square", &square);
  m.def("twice", &twice);
  m.def("add_one", &add_one);
  m.def("past_torch", &past_torch);
}

TORCH_LIBRARY(tapestream_extension, m) { m.def("square(Tensor x) -> Tensor", &square); }

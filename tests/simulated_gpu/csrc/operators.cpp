#include "operators.h"

#include "clock.h"
#include "generator.h"
#include "knobs.h"
#include "memory.h"
#include "shadow.h"

namespace simulated {
namespace {

struct Call {
  c10::OperatorHandle op;
  const Traits& traits;
  std::vector<IValue> arguments;
  c10::Device device;
  Queue* queue = nullptr;
};

std::vector<IValue> popped(Stack* stack, size_t count) {
  std::vector<IValue> arguments(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
  stack->resize(stack->size() - count);
  return arguments;
}

// Where a call runs: where its first tensor of the device lies, or on the device that an argument names.
c10::Device device_of(const std::vector<IValue>& arguments) {
  c10::Device found(kDevice, static_cast<c10::DeviceIndex>(current_device()));
  bool seen = false;
  for (auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      if (!seen && on_device(tensor)) found = tensor.device();
      seen = seen || on_device(tensor);
    });
    if (!seen && argument.isDevice() && argument.toDevice().type() == kDevice && argument.toDevice().has_index())
      found = argument.toDevice();
  }
  return found;
}

void check_devices(const Call& call) {
  auto check = [&](const Tensor& tensor) {
    if (!tensor.defined() || tensor.device() == call.device || tensor.is_meta()) return;
    bool number = tensor.is_cpu() && (tensor.dim() == 0 || call.traits.takes_host_indices);
    TORCH_CHECK(number, "Expected all tensors to be on the same device, but found at least two devices, ", call.device,
                " and ", tensor.device(), "! (when checking arguments for ", call.traits.name, ")");
  };
  for (auto& argument : call.arguments) each_tensor(argument, check);
}

// What the CPU's kernel gets. Numbers of the host are read now, those of the device when the kernel runs.
IValue for_host(const Call& call, size_t k) {
  const auto& argument = call.arguments[k];
  if (argument.isDevice()) return c10::Device(c10::kCPU);
  if (static_cast<int>(k) == call.traits.generator) {
    auto given = argument.isNone() ? std::nullopt : std::optional<at::Generator>(argument.toGenerator());
    return host_generator(DeviceGenerator::of(given, call.device.index()).draw());
  }
  return mapped(argument, [](const Tensor& tensor) {
    if (!tensor.defined() || on_device(tensor)) return shadow(tensor);
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor.clone();
    auto copy = tensor.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  });
}

// Of a tensor: where it is expanded, what is stored of it.
int64_t bytes_of(const Tensor& tensor) {
  if (!on_device(tensor)) return 0;
  return static_cast<int64_t>(std::min(tensor.nbytes(), tensor.storage().nbytes()));
}

// From the `first` value on.
int64_t bytes_of(const std::vector<IValue>& values, size_t first = 0) {
  int64_t nbytes = 0;
  for (size_t k = first; k < values.size(); k++) each_tensor(values[k], [&](const Tensor& t) { nbytes += bytes_of(t); });
  return nbytes;
}

// What the virtual clock counts of an operator: bytes of what it is given and of what it makes. Of a table in which it
// looks up rows, it reads as much as it makes.
int64_t moved_by(const Call& call, const std::vector<Tensor>& fresh) {
  bool rows = looks_up(call.traits.name);
  int64_t made = 0;
  for (auto& tensor : fresh) made += tensor.defined() ? bytes_of(tensor) : 0;
  return bytes_of(call.arguments, rows ? 1 : 0) + (rows ? 2 * made : made);
}

at::ScalarType dtype_of(const std::vector<IValue>& values) {
  at::ScalarType found = at::kByte;
  for (auto& value : values)
    each_tensor(value, [&](const Tensor& t) {
      if (t.defined() && t.is_floating_point() && found == at::kByte) found = t.scalar_type();
    });
  return found;
}

// ------------------------------------------------------------------------------------- on the stream's thread

// A norm with 32 bits. Running statistics of 16 bits are written back: they are arguments that it changes.
void run_norm(const c10::OperatorHandle& op, Stack& stack) {
  std::vector<std::pair<Tensor, Tensor>> widened;
  for (auto& value : stack)
    value = mapped(value, [&](const Tensor& tensor) {
      if (!has_16_bits(tensor)) return tensor;
      widened.emplace_back(tensor, tensor.to(at::kFloat));
      return widened.back().second;
    });
  bool running = op.schema().name() == "aten::native_batch_norm" && stack[5].toBool();
  std::vector<std::pair<Tensor, Tensor>> statistics;
  if (running)
    for (size_t k : {3, 4})
      for (auto& [narrow, wide] : widened)
        if (stack[k].isTensor() && stack[k].toTensor().is_same(wide)) statistics.emplace_back(narrow, wide);
  op.callBoxed(stack);
  for (auto& [narrow, wide] : statistics) narrow.copy_(wide);
}

void run_kernel(const Call& call, Stack& stack, const std::vector<Tensor>& targets) {
  call.traits.norm ? run_norm(call.op, stack) : call.op.callBoxed(stack);
  size_t next = 0;
  for (size_t i = 0; i < call.traits.returns.size(); i++) {
    if (call.traits.returns[i].kind != Traits::kNew) continue;
    each_tensor(stack[i], [&](const Tensor& result) {
      const Tensor& target = targets[next++];
      // In evaluation a batch norm saves nothing, whatever its meta function says.
      if (result.defined() && result.numel() && target.defined() && target.numel()) target.copy_(result);
    });
  }
}

// ----------------------------------------------------------------------------------------------- the host goes on

Tensor made(const Shape& shape, c10::Device device) {
  return shape.defined ? new_tensor(device, shape.sizes, shape.strides, shape.dtype) : Tensor();
}

IValue result_of(const Call& call, size_t index, const Inferred::Result& inferred, std::vector<Tensor>& fresh) {
  const auto& traits = call.traits.returns[index];
  if (traits.kind == Traits::kWritten) return call.arguments[traits.argument];
  auto one = [&](const Shape& shape) {
    if (traits.kind == Traits::kNew) {
      fresh.push_back(made(shape, call.device));
      return fresh.back();
    }
    return at::as_strided(call.arguments[traits.argument].toTensor(), shape.sizes, shape.strides, shape.offset);
  };
  if (!inferred.list) return one(inferred.shapes.at(0));
  c10::List<Tensor> list;
  for (auto& shape : inferred.shapes) list.push_back(one(shape));
  return list;
}

void resize_written(const Call& call, const Inferred& inferred) {
  for (size_t i = 0; i < inferred.written.size(); i++) {
    const auto& argument = call.arguments[call.traits.written[i]];
    const auto& shape = inferred.written[i];
    if (!argument.isTensor() || !on_device(argument.toTensor()) || !shape.defined) continue;
    if (argument.toTensor().sizes() != IntArrayRef(shape.sizes)) resize(argument.toTensor(), shape.sizes, shape.strides);
  }
}

void issue(const Call& call, const Inferred& inferred, Stack* stack) {
  resize_written(call, inferred);
  std::vector<Tensor> fresh;
  std::vector<IValue> results;
  bool works = call.traits.returns.empty();
  for (size_t i = 0; i < call.traits.returns.size(); i++) {
    static const Inferred::Result written{false, {}};
    results.push_back(result_of(call, i, i < inferred.results.size() ? inferred.results[i] : written, fresh));
    works = works || call.traits.returns[i].kind != Traits::kView;
  }
  if (works) {
    auto host = std::make_shared<Stack>();
    for (size_t k = 0; k < call.arguments.size(); k++) host->push_back(for_host(call, k));
    std::vector<Tensor> targets;
    for (auto& tensor : fresh) targets.push_back(shadow(tensor));
    double operations = 0;
    int64_t nbytes = 0;
    if (virtual_clock().on()) {
      operations = operations_of(call.traits.name, call.arguments, results);
      nbytes = moved_by(call, fresh);
    }
    Call later{call.op, call.traits, {}, call.device};
    issue_kernel(call.queue, call.traits.name, operations, dtype_of(call.arguments), nbytes,
                 [later, host, targets] { run_kernel(later, *host, targets); });
  }
  for (auto& result : results) stack->push_back(std::move(result));
}

// ------------------------------------------------------------------------------------------------- the host waits

// An `out=` argument of a shape that only the result tells.
bool is_out(const Call& call, size_t k) {
  const auto& argument = call.op.schema().arguments()[k];
  return argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite() &&
      call.arguments[k].isTensor() && on_device(call.arguments[k].toTensor());
}

void write(const Call& call, const Tensor& target, const Tensor& numbers) {
  if (!numbers.numel()) return;
  call.queue->put([to = shadow(target), from = numbers] { to.copy_(from); });
}

void run_now(const Call& call, Stack* stack) {
  synchronize(call.queue, call.traits.name);
  Stack host;
  std::vector<std::pair<Tensor, Tensor>> outs;
  for (size_t k = 0; k < call.arguments.size(); k++) {
    if (!is_out(call, k)) {
      host.push_back(for_host(call, k));
      continue;
    }
    auto target = call.arguments[k].toTensor();
    outs.emplace_back(target, at::empty({0}, target.options().device(at::kCPU)));
    host.emplace_back(outs.back().second);
  }
  count(kJobs);
  virtual_clock().kernel(call.queue, call.traits.name, 0, dtype_of(call.arguments), bytes_of(call.arguments));
  call.op.callBoxed(host);
  virtual_clock().host_waits_for(call.queue);
  for (auto& [target, numbers] : outs) {
    resize(target, numbers.sizes(), numbers.strides());
    write(call, target, numbers);
  }
  for (size_t i = 0; i < call.traits.returns.size(); i++) {
    if (call.traits.returns[i].kind == Traits::kWritten) {
      stack->push_back(call.arguments[call.traits.returns[i].argument]);
      continue;
    }
    stack->push_back(mapped(host[i], [&](const Tensor& numbers) {
      if (!numbers.defined()) return numbers;
      auto result = new_tensor(call.device, numbers.sizes(), numbers.strides(), numbers.scalar_type());
      write(call, result, numbers);
      return result;
    }));
  }
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& traits = traits_of(op);
  auto arguments = popped(stack, op.schema().arguments().size());
  auto device = device_of(arguments);
  c10::DeviceGuard guard(device);
  Call call{op, traits, std::move(arguments), device, current_queue(device.index())};
  raise_late_error();
  check_devices(call);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  if (traits.product) take_workspace(device.index());
  static const Inferred nothing;
  if (traits.in_place && !traits.waits) return issue(call, nothing, stack);
  auto inferred = traits.waits ? nullptr : infer(op, traits, call.arguments);
  inferred ? issue(call, *inferred, stack) : run_now(call, stack);
}

// ------------------------------------------------------------------------------------------------------- registration

namespace {

void boxed(const c10::OperatorHandle& op, Stack* stack) {
  run_operator(op, stack);
}

TORCH_LIBRARY_IMPL(_, SIMULATED_TYPE, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

// Compositions of many operators that are one kernel on a GPU too.
bool is_whole(const std::string& name) {
  return name == "aten::convolution" || name == "aten::convolution_backward";
}

}  // namespace

// Where the CPU has a kernel of its own and others a composition of other operators, ours is the CPU's. The operators
// that other files write themselves are registered by then.
void register_operators() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0)) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kKey)) continue;
    bool both = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!both && !is_whole(name.name)) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
}

}  // namespace simulated

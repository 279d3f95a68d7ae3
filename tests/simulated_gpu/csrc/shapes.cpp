#include <ATen/PythonTorchFunctionTLS.h>

#include "operators.h"
#include "shadow.h"

namespace simulated {
namespace {

constexpr size_t kMostRemembered = 100000;

// All that shapes depend on, as bytes. What it cannot say is not remembered.
class Key {
 public:
  std::string bytes;
  bool complete = true;

  template <class T>
  void number(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <class List>
  void numbers(const List& list) {
    number(list.size());
    for (auto value : list) number(value);
  }
  void tensor(const Tensor& tensor) {
    bytes += 't';
    number(tensor.defined());
    if (!tensor.defined()) return;
    numbers(tensor.sizes());
    numbers(tensor.strides());
    number(tensor.storage_offset());
    number(tensor.storage().nbytes());
    number(tensor.scalar_type());
    int marks = tensor.unsafeGetTensorImpl()->is_wrapped_number() + 2 * tensor.is_conj() + 4 * tensor.is_neg();
    number(marks);
  }
  void value(const IValue& value) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isNone() || value.isDevice() || value.isGenerator()) {
      bytes += 'n';
    } else if (value.isInt()) {
      bytes += 'i';
      number(value.toInt());
    } else if (value.isBool()) {
      bytes += 'b';
      number(value.toBool());
    } else if (value.isDouble()) {
      bytes += 'd';
      number(value.toDouble());
    } else if (value.isString()) {
      bytes += 's';
      number(value.toStringRef().size());
      bytes += value.toStringRef();
    } else {
      list(value);
    }
  }

 private:
  void list(const IValue& value) {
    if (value.isTensorList() || value.isOptionalTensorList()) {
      bytes += 'l';
      size_t at = bytes.size(), length = 0;
      each_tensor(value, [&](const Tensor& one) { tensor(one); length++; });
      if (value.isOptionalTensorList()) {
        for (const auto& one : value.toOptionalTensorVector()) number(one.has_value());
        length = value.toOptionalTensorVector().size();
      }
      bytes.insert(at, std::to_string(length) + ":");
    } else if (value.isIntList()) {
      bytes += 'I';
      numbers(value.toIntVector());
    } else if (value.isDoubleList()) {
      bytes += 'D';
      numbers(value.toDoubleVector());
    } else if (value.isBoolList()) {
      bytes += 'B';
      const auto all = value.toBoolList();
      number(all.size());
      for (bool one : all) number(one);
    } else {
      complete = false;
    }
  }
};

Shape shape_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.scalar_type()};
}

// Give results of a norm the dtypes that a GPU gives them.
void correct_norm(const Traits& traits, const std::vector<IValue>& arguments, Inferred& inferred) {
  for (size_t i = 0; i < inferred.results.size(); i++) {
    int like = traits.returns[i].like;
    if (like < 0 || !arguments[like].isTensor() || !arguments[like].toTensor().defined()) continue;
    for (auto& shape : inferred.results[i].shapes) shape.dtype = arguments[like].toTensor().scalar_type();
  }
}

Inferred asked(const c10::OperatorHandle& op, const Traits& traits, const std::vector<IValue>& arguments) {
  // What the program watches, it watches on the device: neither modes nor functions of classes see the inference.
  c10::impl::ExcludeDispatchKeyGuard modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  auto functions = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  struct Restored {
    at::impl::TorchFunctionDisabledState state;
    ~Restored() { at::impl::PythonTorchFunctionTLS::set_disabled_state(state); }
  } restored{functions};
  bool wide = false;
  if (traits.norm)
    for (auto& argument : arguments) each_tensor(argument, [&](const Tensor& t) { wide = wide || has_16_bits(t); });
  Stack stack;
  for (auto& argument : arguments) {
    if (argument.isDevice()) stack.emplace_back(c10::Device(c10::kMeta));
    else if (argument.isGenerator()) stack.emplace_back();
    else stack.push_back(mapped(argument, [&](const Tensor& tensor) {
      auto shape = shape_only(tensor);
      return wide && has_16_bits(shape) ? shape.to(at::kFloat) : shape;
    }));
  }
  auto given = stack;
  op.callBoxed(stack);
  Inferred inferred;
  for (auto& result : stack) {
    inferred.results.push_back({result.isTensorList(), {}});
    each_tensor(result, [&](const Tensor& tensor) { inferred.results.back().shapes.push_back(shape_of(tensor)); });
  }
  for (size_t k : traits.written) inferred.written.push_back(given[k].isTensor() ? shape_of(given[k].toTensor()) : Shape{});
  if (wide) correct_norm(traits, arguments, inferred);
  return inferred;
}

}  // namespace

std::shared_ptr<const Inferred> infer(const c10::OperatorHandle& op, const Traits& traits,
                                      const std::vector<IValue>& arguments) {
  static auto* lock = new std::mutex;
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Inferred>>;
  Key key;
  key.number(static_cast<const void*>(&traits));
  key.number(c10::get_default_dtype_as_scalartype());
  for (auto& argument : arguments) key.value(argument);
  if (key.complete) {
    std::lock_guard<std::mutex> held(*lock);
    if (auto found = known->find(key.bytes); found != known->end()) return found->second;
  }
  std::shared_ptr<const Inferred> made;
  try {
    made = std::make_shared<Inferred>(asked(op, traits, arguments));
  } catch (const std::exception&) {
    return nullptr;  // it has no inference, or the arguments are wrong: the CPU's kernel will say so
  }
  if (key.complete) {
    std::lock_guard<std::mutex> held(*lock);
    if (known->size() >= kMostRemembered) known->clear();
    known->emplace(std::move(key.bytes), made);
  }
  return made;
}

}  // namespace simulated

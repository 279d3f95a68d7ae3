#include <set>
#include <shared_mutex>

#include "operators.h"

namespace simulated {
namespace {

// Norms of 16-bit numbers: a GPU computes with 32 bits and keeps statistics of 32. Of each result: the argument that has
// its dtype, -1 for 32 bits. The CPU's kernels have other rules.
const std::map<std::string, std::vector<int>> kNorms = {
    {"aten::native_layer_norm", {0, -1, -1}},
    {"aten::native_layer_norm_backward", {1, 5, 6}},
    {"aten::native_group_norm", {0, -1, -1}},
    {"aten::native_group_norm_backward", {1, 4, 4}},
    {"aten::native_batch_norm", {0, -1, -1}},
    {"aten::native_batch_norm_backward", {1, 2, 2}},
    {"aten::_fused_rms_norm", {0, -1}},
    {"aten::_fused_rms_norm_backward", {1, 4}},
};

const std::set<std::string> kProducts = {"aten::mm",     "aten::addmm",   "aten::bmm",    "aten::baddbmm",
                                         "aten::addbmm", "aten::mv",      "aten::addmv",  "aten::dot",
                                         "aten::linear", "aten::addr",    "aten::_addmm_activation"};

// Indices and lengths may lie on the host; a GPU copies them.
const std::set<std::string> kTakesHostIndices = {
    "aten::index",       "aten::index_put",     "aten::index_put_",           "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence",
    "aten::_pack_padded_sequence_backward"};

bool starts(const std::string& name, const char* with) {
  return name.rfind(with, 0) == 0;
}

bool has_tag(const c10::OperatorHandle& op, at::Tag wanted) {
  for (auto tag : op.getTags())
    if (tag == wanted) return true;
  return false;
}

bool is_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

Traits::Return return_of(const c10::FunctionSchema& schema, size_t index) {
  Traits::Return made;
  auto* alias = schema.returns()[index].alias_info();
  if (!alias || alias->beforeSets().empty()) return made;
  made.kind = alias->isWrite() ? Traits::kWritten : Traits::kView;
  for (size_t k = 0; k < schema.arguments().size(); k++) {
    auto* other = schema.arguments()[k].alias_info();
    if (other && other->beforeSets() == alias->beforeSets()) {
      made.argument = k;
      break;
    }
  }
  return made;
}

Traits found(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Traits traits;
  traits.name = schema.name().c_str();
  traits.waits = has_tag(op, at::Tag::dynamic_output_shape) || has_tag(op, at::Tag::data_dependent_output);
  bool all_written = true;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    traits.waits = traits.waits || !is_tensors(schema.returns()[i].type());
    traits.returns.push_back(return_of(schema, i));
    all_written = all_written && traits.returns.back().kind == Traits::kWritten;
  }
  for (size_t k = 0; k < schema.arguments().size(); k++) {
    const auto& argument = schema.arguments()[k];
    if (starts(argument.type()->str(), "Generator")) traits.generator = static_cast<int>(k);
    bool single = argument.type()->isSubtypeOf(*c10::TensorType::get());
    if (single && argument.alias_info() && argument.alias_info()->isWrite()) traits.written.push_back(k);
  }
  const auto& name = schema.name();
  bool of_lists = starts(name, "aten::_foreach_") || starts(name, "aten::_fused_adam") ||
                  starts(name, "aten::_fused_sgd") || starts(name, "aten::_fused_adagrad") || starts(name, "aten::_amp_");
  traits.in_place = all_written && (of_lists || schema.returns().empty());
  traits.product = kProducts.count(name);
  traits.takes_host_indices = kTakesHostIndices.count(name);
  if (auto norm = kNorms.find(name); norm != kNorms.end() && schema.overload_name().empty()) {
    traits.norm = true;
    for (size_t i = 0; i < traits.returns.size(); i++) traits.returns[i].like = norm->second[i];
  }
  return traits;
}

}  // namespace

const Traits& traits_of(const c10::OperatorHandle& op) {
  static auto* lock = new std::shared_mutex;
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<Traits>>;
  const void* key = &op.schema();
  {
    std::shared_lock<std::shared_mutex> held(*lock);
    if (auto at = known->find(key); at != known->end()) return *at->second;
  }
  auto made = std::make_unique<Traits>(found(op));
  std::unique_lock<std::shared_mutex> held(*lock);
  return *known->emplace(key, std::move(made)).first->second;
}

}  // namespace simulated

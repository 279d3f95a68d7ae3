// What the virtual clock counts of an operator.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "operators.h"

namespace simulated {
namespace {

double elements(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? static_cast<double>(value.toTensor().numel()) : 0;
}

// Of a convolution: products and sums for each weight and each place where the filter lies.
double of_convolution(const IValue& large, const IValue& weight) {
  const auto& filters = weight.toTensor();
  return 2 * elements(large) * static_cast<double>(filters.numel()) / std::max<int64_t>(1, filters.size(0));
}

}  // namespace

bool looks_up(const char* name) {
  static const char* const known[] = {"embedding", "index_select", "index", "gather", "take"};
  const char* short_name = name + strlen("aten::");
  return std::any_of(std::begin(known), std::end(known), [&](const char* one) { return !strcmp(short_name, one); });
}

double operations_of(const char* name, const std::vector<IValue>& arguments, const std::vector<IValue>& results) {
  const char* short_name = name + strlen("aten::");
  auto is = [&](const char* other) { return !strcmp(short_name, other); };
  auto inner = [&](size_t k) { return static_cast<double>(arguments[k].toTensor().size(-1)); };
  if (results.empty()) return 0;
  if (is("mm") || is("bmm") || is("mv") || is("dot") || is("linear")) return 2 * elements(results[0]) * inner(0);
  if (is("addmm") || is("baddbmm") || is("addmv") || is("_addmm_activation")) return 2 * elements(results[0]) * inner(1);
  if (is("addbmm")) return 2 * elements(results[0]) * inner(1) * static_cast<double>(arguments[1].toTensor().size(0));
  if (is("convolution")) {
    bool transposed = arguments[6].toBool();
    return of_convolution(transposed ? arguments[0] : results[0], arguments[1]);
  }
  if (is("convolution_backward")) {
    bool transposed = arguments[7].toBool();
    double once = of_convolution(transposed ? arguments[1] : arguments[0], arguments[2]);
    return once * ((elements(results[0]) > 0) + (elements(results[1]) > 0));
  }
  return 0;
}

}  // namespace simulated

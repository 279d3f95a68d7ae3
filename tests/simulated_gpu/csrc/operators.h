// Every operator of PyTorch on the simulated device. The host infers the shapes of its results and goes on; the stream's
// thread runs the CPU's kernel. Where numbers decide the shape, the host waits, as it does for a GPU.
#pragma once

#include "tensors.h"

namespace simulated {

// What of an operator does not depend on its arguments.
struct Traits {
  enum Result { kNew, kWritten, kView };
  struct Return {
    Result kind = kNew;
    size_t argument = 0;  // the one that is written or viewed
    int16_t like = -1;    // of a norm of 16-bit numbers: the argument whose dtype this result has; -1: 32 bits
  };

  const char* name = "";
  std::vector<Return> returns;
  std::vector<size_t> written;  // arguments that are single tensors and written
  int generator = -1;           // which argument is the generator
  bool waits = false;           // shapes of results depend on numbers, or results are no tensors
  bool in_place = false;        // all results are written arguments, of which none changes its shape
  bool norm = false;            // computes with 32 bits when its input has 16
  bool takes_host_indices = false;
  bool product = false;         // takes a workspace
};

const Traits& traits_of(const c10::OperatorHandle& op);

struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
};

struct Inferred {
  struct Result {
    bool list = false;
    std::vector<Shape> shapes;
  };
  std::vector<Result> results;
  std::vector<Shape> written;  // of traits.written: as they are afterwards
};

// Shapes of results by PyTorch's own inference, remembered by the arguments. Null: nobody can tell.
std::shared_ptr<const Inferred> infer(const c10::OperatorHandle& op, const Traits& traits, const std::vector<IValue>& arguments);

// Arithmetic operations of one call, counted from shapes; 0 for those that memory bounds.
double operations_of(const char* name, const std::vector<IValue>& arguments, const std::vector<IValue>& results);

// Whether an operator reads few rows of its first argument.
bool looks_up(const char* name);

// The operator itself, for the dispatcher.
void run_operator(const c10::OperatorHandle& op, Stack* stack);

}  // namespace simulated

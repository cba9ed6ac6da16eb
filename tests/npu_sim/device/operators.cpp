// Operators of the simulated NPU: the rules of the device are checked, then the operator of the host
// computes on the device's memory.
#include "simulated.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <vector>

namespace sim {
namespace {
using at::Tensor;
using Format = std::optional<at::MemoryFormat>;

std::mutex lock;
Rules rules;
bool recording = false;
std::set<std::pair<std::string, std::string>> pairs;

int index_of(const std::optional<at::Device>& device) {
  return device && device->has_index() ? device->index() : current_device();
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, Format format) {
  c10::DeviceGuard guard(at::Device(NPU, index_of(device)));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(at::Device(NPU, index_of(device)));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// As in torch_npu, CopyKernelOpApi.cpp (v2.7.1-7.3.0): a blocking copy first waits for the current
// stream, a non-blocking copy is a task of that stream; a copy within one device is an operator.
Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  const bool crosses = self.device().is_cpu() != target.device().is_cpu();
  const int index = self.device().type() == NPU ? self.device().index() : target.device().index();
  const Tensor& of_host = self.device().is_cpu() ? self : target;
  if (crosses && !(non_blocking && of_host.is_pinned())) count_wait("copy");
  if (crosses && non_blocking && is_delayed()) {
    enqueue(self, target, index);
    return target;
  }
  settle(index);
  if (crosses) synchronize_stream(current_stream(index));
  host_view(target).copy_(host_view(self));
  return target;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) const_cast<Tensor&>(target).resize_(self.sizes());
  return copy_from(self, target, false);
}
at::Scalar scalar(const Tensor& self) {
  count_wait("scalar");
  synchronize_stream(current_stream(self.device().index()));
  return at::native::_local_scalar_dense_cpu(host_view(self));
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, Format format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage(Tensor& self, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(self, s, offset, size, stride);
}
Tensor& set_source(Tensor& self, at::Storage s) {
  int64_t n = s.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_meta__symint(self, s, 0, {c10::SymInt(n)}, {});
}
void record_stream(Tensor&, at::Stream) {}

// As in torch_npu, ToKernelNpu.cpp (2.7.1-7.2.0 to 26.1.0): `to` with only the dtype fp64 gives fp32.
Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pin, bool non_blocking, Format format) {
  if (dtype == at::kDouble && self.scalar_type() != at::kDouble && !layout && !device) {
    TORCH_WARN_ONCE("Device do not support double dtype now, dtype cast replace with float.");
    dtype = at::kFloat;
  }
  return at::native::_to_copy(self, dtype, layout, device, pin, non_blocking, format);
}

// As in torch_npu, HasCompatibleShallowCopyType.cpp: `tensor.data = other` may change the device.
bool has_compatible_type(const Tensor& a, const Tensor& b) {
  auto dense = [](c10::DispatchKeySet k) { return k.has(c10::DispatchKey::CPU) || k.has(c10::DispatchKey::PrivateUse1); };
  return a.key_set() == b.key_set() || (dense(a.key_set()) && dense(b.key_set()));
}

// One call of an operator: turns its arguments into tensors of the host, its results into tensors of
// the device.
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  std::vector<std::pair<Tensor, Tensor>> views;  // (tensor of the device, the same as one of the host)
  std::vector<std::pair<Tensor, Tensor>> fresh;  // (empty output, tensor of the host written instead)
  int index = -1;
  bool on_host = false;
  std::string name;
  bool judged = false;

  Tensor host(const Tensor& tensor, bool written, bool output) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != NPU) {
      if (tensor.dim() > 0 && tensor.device().is_cpu()) on_host = true;
      return tensor;
    }
    TORCH_CHECK(index < 0 || index == tensor.device().index(), "simulated NPU: ", name,
                " got tensors of npu:", index, " and npu:", tensor.device().index());
    index = tensor.device().index();
    judge(tensor);
    if (output && written && tensor.numel() == 0) {
      fresh.emplace_back(tensor, at::empty({0}, tensor.options().device(at::kCPU)));
      return fresh.back().second;
    }
    views.emplace_back(tensor, host_view(tensor));
    return views.back().second;
  }
  void judge(const Tensor& tensor) {
    const std::string dtype = c10::toString(tensor.scalar_type());
    std::lock_guard<std::mutex> guard(lock);
    if (std::exchange(judged, true)) return;  // only the dtype of the first tensor is checked
    if (recording) pairs.insert({name, dtype});
    auto found = rules.find(name);
    if (found == rules.end()) return;
    const auto& rule = found->second;
    TORCH_CHECK(rule.dtypes.count(dtype), "simulated NPU: ", name, " does not support ", dtype, " (", rule.source, ")");
    TORCH_CHECK(rule.takes_dtype || !gives_dtype(), "simulated NPU: ", name, " does not support the argument dtype (",
                rule.source, ")");
  }
  bool gives_dtype() const {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype" && !(*stack)[stack->size() - arguments.size() + i].isNone()) return true;
    return false;
  }
  // Whether the size of the result depends on values, for which the host has to wait.
  bool sizes_result() const {
    static const std::set<std::string> always = {"nonzero", "masked_select", "bincount", "equal",
                                                 "_unique2", "unique_dim", "unique_consecutive"};
    if (always.count(name)) return true;
    const auto& arguments = op.schema().arguments();
    const auto first = stack->size() - arguments.size();
    if (name == "repeat_interleave") return (*stack)[stack->size() - 1].isNone();  // its output_size
    if (name != "index" && name != "index_put_" && name != "_index_put_impl_") return false;
    for (const auto& each : (*stack)[first + 1].toOptionalTensorList()) {
      std::optional<Tensor> t = each;
      if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    }
    return false;
  }
  c10::IValue host_value(const c10::IValue& value, bool written, bool output) {
    if (value.isTensor()) return host(value.toTensor(), written, output);
    if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const auto& t : value.toTensorVector()) all.push_back(host(t, written, output));
      return c10::List<Tensor>(all);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const auto& each : value.toOptionalTensorList()) {
        std::optional<Tensor> t = each;
        all.push_back(t ? std::optional<Tensor>(host(*t, false, false)) : std::nullopt);
      }
      return all;
    }
    if (value.isDevice() && value.toDevice().type() == NPU) {
      if (index < 0) index = index_of(value.toDevice());
      return c10::Device(at::kCPU);
    }
    return value;
  }
  Tensor device(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [original, view] : views) {
      if (result.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) return original;
      if (result.storage().unsafeGetStorageImpl() == view.storage().unsafeGetStorageImpl()) {
        auto alias = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(original.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
        alias.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        return alias;
      }
    }
    for (auto& [original, written] : fresh)
      if (result.unsafeGetTensorImpl() == written.unsafeGetTensorImpl()) return original;
    return adopt(result, index);
  }
  c10::IValue device_value(const c10::IValue& value) {
    if (value.isTensor()) return device(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const auto& t : value.toTensorVector()) all.push_back(device(t));
      return c10::List<Tensor>(all);
    }
    return value;
  }
  void run() {
    const auto& schema = op.schema();
    name = schema.name().substr(schema.name().find("::") + 2);
    const auto first = stack->size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      auto& slot = (*stack)[first + i];
      slot = host_value(slot, written, argument.kwarg_only());
    }
    if (index < 0) index = current_device();
    TORCH_CHECK(!on_host || views.empty(), "simulated NPU: ", name,
                " got tensors of the host and of npu:", index, " in one call; move them to one device");
    for (size_t i = 0; i < schema.arguments().size(); ++i) {  // the random stream of the device
      auto& slot = (*stack)[first + i];
      if (schema.arguments()[i].name() == "generator" && slot.isNone()) slot = generator(index);
    }
    if (sizes_result()) count_wait(name);
    settle(index);
    c10::Dispatcher::singleton().redispatchBoxed(op, c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (auto& [original, written] : fresh) {
      const_cast<Tensor&>(original).resize_(written.sizes());
      host_view(original).copy_(written);
    }
    for (auto& slot : torch::jit::last(*stack, schema.returns().size()))
      const_cast<c10::IValue&>(slot) = device_value(slot);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call{op, stack}.run(); }
}  // namespace

void set_rules(Rules given) {
  std::lock_guard<std::mutex> guard(lock);
  rules = std::move(given);
}
void record_pairs(bool on) {
  std::lock_guard<std::mutex> guard(lock);
  recording = on;
  pairs.clear();
}
std::set<std::pair<std::string, std::string>> recorded_pairs() {
  std::lock_guard<std::mutex> guard(lock);
  return pairs;
}
}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("_copy_from", &sim::copy_from);
  m.impl("_copy_from_and_resize", &sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", &sim::scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", &sim::resize);
  m.impl("set_.source_Storage", &sim::set_source);
  m.impl("set_.source_Storage_storage_offset", &sim::set_storage);
  m.impl("_to_copy", &sim::to_copy);
  m.impl("record_stream", &sim::record_stream);
}
TORCH_LIBRARY_IMPL(aten, CatchAll, m) { m.impl("_has_compatible_shallow_copy_type", &sim::has_compatible_type); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }

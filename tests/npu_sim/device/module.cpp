// HCCL simulated by gloo, with the checks of HCCL, and the functions that Python calls.
//
// Rules: ProcessGroupHCCL.cpp of Ascend/pytorch, branch v2.7.1-7.3.0.
#include "simulated.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <pybind11/chrono.h>

namespace py = pybind11;

namespace sim {
namespace {
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

// Ends when the work of gloo ends. Keeps the tensors alive, then runs `then`, which turns the result
// of gloo into that of HCCL.
struct HcclWork final : c10d::Work {
  HcclWork(std::vector<Pending> parts, Tensors kept, Tensors results, std::function<void()> then)
      : parts_(std::move(parts)), kept_(std::move(kept)), results_(std::move(results)), then_(std::move(then)) {}
  bool isCompleted() override {
    for (auto& part : parts_)
      if (!part->isCompleted()) return false;
    finish();
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& part : parts_) part->wait(timeout);
    finish();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  void finish() {
    if (!std::exchange(done_, true) && then_) then_();
  }
  std::vector<Pending> parts_;
  Tensors kept_, results_;
  std::function<void()> then_;
  bool done_ = false;
};

struct Hccl final : c10d::Backend {
  Hccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  // --- checks of arguments ---
  static Tensor dense(const Tensor& t) {
    TORCH_CHECK(t.device().type() == NPU && !t.is_sparse(), "HCCL: Tensors must be NPU and dense, not of ", t.device());
    TORCH_CHECK(t.is_contiguous(), "HCCL: Tensors must be contiguous");
    settle(t.device().index());
    return host_view(t);
  }
  static Tensors dense(const Tensors& all) {
    TORCH_CHECK(!all.empty(), "HCCL: Tensor list must be nonempty");
    Tensors views;
    for (const auto& t : all) views.push_back(dense(t));
    return views;
  }
  static void check_sum(const Tensor& t, const c10d::ReduceOp& op, const char* function, bool casts = false) {
    static const std::set<at::ScalarType> known = {at::kChar, at::kShort,    at::kInt, at::kLong,
                                                   at::kHalf, at::kBFloat16, at::kFloat};
    const auto dtype = t.scalar_type();
    const bool is_cast = casts && (dtype == at::kBool || dtype == at::kByte);
    TORCH_CHECK(is_cast || known.count(dtype), "HCCL ", function, ": Unsupported data type ", dtype);
    TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::MAX ||
                    op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::PRODUCT,
                "HCCL ", function, ": Unhandled ReduceOp; it has SUM, AVG, MAX, MIN and PRODUCT");
  }
  // gloo computes AVG as a sum; `average` divides it afterwards.
  static c10d::ReduceOp reduction(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op; }
  std::function<void()> average(const c10d::ReduceOp& op, Tensors views) const {
    if (!(op == c10d::ReduceOp::AVG)) return nullptr;
    return [views, n = getSize()]() mutable {
      c10::NoGradGuard no_grad;
      for (auto& v : views) v.is_floating_point() ? v.div_(n) : v.floor_divide_(n);
    };
  }
  static Pending work(std::vector<Pending> parts, Tensors kept, Tensors results, std::function<void()> then = nullptr) {
    return c10::make_intrusive<HcclWork>(std::move(parts), std::move(kept), std::move(results), std::move(then));
  }

  // --- collectives ---
  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto views = dense(tensors);
    check_sum(tensors[0], opts.reduceOp, "allreduce", true);
    auto options = opts;
    options.reduceOp = reduction(opts.reduceOp);
    auto inside = views;
    std::function<void()> then = average(opts.reduceOp, views);
    if (views[0].scalar_type() == at::kBool || views[0].scalar_type() == at::kByte) {
      inside = {views[0].to(at::kInt)};
      then = [views, inside]() mutable { views[0].copy_(inside[0]); };
    }
    return work({gloo_->allreduce(inside, options)}, inside, tensors, then);
  }
  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    std::vector<Pending> parts;
    for (auto& t : tensors) {
      Tensors one = {t};
      c10d::AllreduceOptions options;
      options.reduceOp = opts.reduceOp;
      options.timeout = opts.timeout;
      parts.push_back(allreduce(one, options));
    }
    return work(parts, tensors, tensors);
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto views = dense(tensors);
    return work({gloo_->broadcast(views, opts)}, views, tensors);
  }
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto views = dense(tensors);
    check_sum(tensors[0], opts.reduceOp, "reduce");
    return work({gloo_->reduce(views, opts)}, views, tensors);
  }
  // Outputs of different sizes are broadcast one by one, each from its rank.
  Pending allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto mine = dense(inputs);
    auto parts = outputs.at(0);
    Tensors views;
    for (auto& t : parts) {
      TORCH_CHECK(t.device().type() == NPU, "HCCL: Tensors must be NPU and dense, not of ", t.device());
      views.push_back(host_view(t));
    }
    bool even = true;
    for (auto& v : views) even = even && v.sizes() == mine[0].sizes();
    if (even) {
      std::vector<Tensors> lists = {views};
      return work({gloo_->allgather(lists, mine, opts)}, views, parts);
    }
    views[getRank()].copy_(mine[0]);
    std::vector<Pending> all;
    for (int rank = 0; rank < getSize(); ++rank) {
      Tensors one = {views[rank]};
      c10d::BroadcastOptions options;
      options.rootRank = rank;
      all.push_back(gloo_->broadcast(one, options));
    }
    return work(all, views, parts);
  }
  Pending _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(output.numel() == input.numel() * getSize(),
                "HCCL: output tensor size must be equal to world_size times input tensor size");
    auto to = dense(output), from = dense(input);
    return work({gloo_->_allgather_base(to, from, opts)}, {to, from}, {output});
  }
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    std::vector<Pending> parts;
    for (size_t i = 0; i < outputs.size(); ++i) parts.push_back(_allgather_base(outputs[i], inputs[i], opts));
    return work(parts, inputs, outputs);
  }
  Pending gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override {
    TORCH_CHECK(false, "ProcessGroupHCCL does not support gather");
  }
  Pending recvAnysource(Tensors&, int) override { TORCH_CHECK(false, "ProcessGroupHCCL does not support recv"); }
  Pending scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto to = dense(outputs);
    std::vector<Tensors> from;
    for (auto& each : inputs) from.push_back(dense(each));
    return work({gloo_->scatter(to, from, opts)}, to, outputs);
  }
  // Reduce the inputs over all ranks; each rank keeps its own. Their sizes may differ.
  Pending sum_and_keep(const Tensor& whole, int64_t start, Tensor kept, const c10d::ReduceOp& op, Tensors results) {
    Tensors copy = {whole};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction(op);
    auto last = average(op, {kept});
    auto then = [copy, start, kept, last]() mutable {
      c10::NoGradGuard no_grad;
      kept.copy_(copy[0].narrow(0, start, kept.numel()).view(kept.sizes()));
      if (last) last();
    };
    return work({gloo_->allreduce(copy, options)}, copy, std::move(results), then);
  }
  Pending reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto to = dense(outputs);
    check_sum(outputs[0], opts.reduceOp, "reduce_scatter");
    Tensors flat;
    int64_t start = 0;
    for (size_t i = 0; i < inputs.at(0).size(); ++i) {
      flat.push_back(dense(inputs[0][i]).flatten());
      if (static_cast<int>(i) < getRank()) start += flat.back().numel();
    }
    return sum_and_keep(at::cat(flat), start, to[0], opts.reduceOp, outputs);
  }
  Pending _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(input.scalar_type() == output.scalar_type(), "HCCL: input tensor must be the same type as the output tensor.");
    TORCH_CHECK(input.numel() == output.numel() * getSize(),
                "HCCL: input tensor must be the same size as output size times world size");
    auto to = dense(output), from = dense(input);
    check_sum(input, opts.reduceOp, "_reduce_scatter_base");
    return sum_and_keep(from.flatten().clone(), getRank() * output.numel(), to, opts.reduceOp, {output});
  }
  Pending reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    std::vector<Pending> parts;
    for (size_t i = 0; i < outputs.size(); ++i) parts.push_back(_reduce_scatter_base(outputs[i], inputs[i], opts));
    return work(parts, inputs, outputs);
  }
  Pending alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& opts) override {
    auto to = dense(output), from = dense(input);
    return work({gloo_->alltoall_base(to, from, out_sizes, in_sizes, opts)}, {to, from}, {output});
  }
  Pending alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    auto to = dense(outputs), from = dense(inputs);
    std::vector<int64_t> out_sizes, in_sizes;
    Tensors flat;
    for (auto& t : to) out_sizes.push_back(t.numel());
    for (auto& t : from) in_sizes.push_back(t.numel()), flat.push_back(t.flatten());
    auto sent = at::cat(flat);
    auto got = at::empty({at::sum_integers(out_sizes)}, sent.options());
    auto then = [to, got, out_sizes]() mutable {
      c10::NoGradGuard no_grad;
      auto parts = got.split_with_sizes(out_sizes);
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(parts[i].view(to[i].sizes()));
    };
    return work({gloo_->alltoall_base(got, sent, out_sizes, in_sizes, opts)}, {got, sent}, outputs, then);
  }
  Pending send(Tensors& tensors, int to, int tag) override {
    auto views = dense(tensors);
    return work({gloo_->send(views, to, tag)}, views, tensors);
  }
  Pending recv(Tensors& tensors, int from, int tag) override {
    auto views = dense(tensors);
    return work({gloo_->recv(views, from, tag)}, views, tensors);
  }
  Pending barrier(const c10d::BarrierOptions& opts) override {
    auto options = opts;
    options.device_ids.clear();
    options.device = std::nullopt;
    return work({gloo_->barrier(options)}, {}, {});
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

c10::intrusive_ptr<c10d::Backend> make_hccl(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<Hccl>(gloo, gloo->getRank(), gloo->getSize());
}
}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &sim::start_hooks);
  m.def("set_devices", &sim::set_devices);
  m.def("device_count", &sim::count_devices);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_device);
  m.def("memory", [](int index) {
    auto memory = sim::memory_of(index);
    return std::make_tuple(memory.used, memory.peak, memory.limit);
  });
  m.def("reset_peak", &sim::reset_peak);
  m.def("generator", &sim::generator);
  m.def("set_delayed", &sim::set_delayed);
  m.def("pending_copies", &sim::pending_copies);
  m.def("synchronize_device", [](int index) {
    sim::count_wait("device");
    sim::synchronize_device(index);
  });
  m.def("on_wait", [](const py::object& call) {
    if (call.is_none()) return sim::on_wait(nullptr);
    auto* kept = new py::object(call);  // for the process, as the interpreter may end before it
    sim::on_wait([kept](const std::string& cause) {
      py::gil_scoped_acquire gil;
      (*kept)(cause);
    });
  });
  m.def("is_pending", &sim::is_pending);
  m.def("set_rules", [](const std::map<std::string, std::tuple<std::set<std::string>, bool, std::string>>& given) {
    sim::Rules rules;
    for (const auto& [name, rule] : given) rules[name] = {std::get<0>(rule), std::get<1>(rule), std::get<2>(rule)};
    sim::set_rules(std::move(rules));
  });
  m.def("record_pairs", &sim::record_pairs);
  m.def("recorded_pairs", &sim::recorded_pairs);
  m.def("host_view", &sim::host_view);
  m.def("make_hccl", &sim::make_hccl);
}

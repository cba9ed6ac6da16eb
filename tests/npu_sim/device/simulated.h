// Declarations that the files of the simulated NPU share. Its memory is host memory under another
// device type.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace sim {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 16;

// --- memory: bytes of each device ---
struct Memory {
  int64_t used = 0, peak = 0, limit = 0;
};
void set_devices(int count, int64_t limit);
int count_devices();
int current_device();
void set_device(int index);
Memory memory_of(int index);
void reset_peak(int index);
c10::Allocator* allocator();
// Turn a tensor that an operator of the host has made into one of the device; counts its bytes.
at::Tensor adopt(const at::Tensor& host, int index);
// Return a tensor of the host on the same memory. Operators must not resize it.
at::Tensor host_view(const at::Tensor& tensor);
const at::Generator& generator(int index);
void start_hooks();

// --- delayed copies: a non-blocking copy is done when its stream is waited for ---
void set_delayed(bool on);
bool is_delayed();
int64_t pending_copies();
// Whether a copy into this tensor of the host has not been done yet.
bool is_pending(const at::Tensor& host);
c10::Stream current_stream(int index);
// Put a copy into the queue of the device's current stream, and fill the target with poison.
void enqueue(const at::Tensor& source, const at::Tensor& target, int index);
// Do the copies to the device that come before an operator on the current stream.
void settle(int index);
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(int index);

// --- waits of the host for work that is queued on the device ---
// Called at each wait, with its cause; empty = not called.
void on_wait(std::function<void(const std::string&)> call);
void count_wait(const std::string& cause);

// --- rules of operators ---
// operator, without its namespace -> the dtypes that its first tensor may have, whether it takes an
// argument `dtype`, and the source of the rule
struct Rule {
  std::set<std::string> dtypes;
  bool takes_dtype;
  std::string source;
};
using Rules = std::map<std::string, Rule>;
void set_rules(Rules rules);
void record_pairs(bool on);
std::set<std::pair<std::string, std::string>> recorded_pairs();

}  // namespace sim

// The simulated NPU's memory, streams and events.
//
// An operator computes when it is called. In delayed mode a non-blocking copy between host and device
// does not: it is put into the queue of its stream, and its target is filled with poison. Copies to
// the device are done before the next operator on that stream, or on a stream that waits for it;
// copies to the host are done only by a synchronisation.
#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

namespace sim {
namespace {

std::mutex lock;
int devices = 1;
std::array<Memory, MAX_DEVICES> memories;
thread_local int here = 0;

std::string size_text(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MiB", bytes / 1048576.0);
  return text;
}

int64_t rounded(int64_t bytes) { return (bytes + 511) / 512 * 512; }

void claim(int index, int64_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  auto& m = memories[index];
  // The message is that of NPUCachingAllocator.cpp in Ascend/pytorch, branch v2.7.1-7.3.0.
  TORCH_CHECK(m.used + bytes <= m.limit, "NPU out of memory. Tried to allocate ", size_text(bytes),
              " (NPU ", index, "; ", size_text(m.limit), " total capacity; ", size_text(m.used),
              " already allocated; ", size_text(m.used), " current active; ",
              size_text(m.limit - m.used), " free; ", size_text(m.used),
              " reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
              "max_split_size_mb to avoid fragmentation.");
  m.used += bytes;
  m.peak = std::max(m.peak, m.used);
}

struct Block {  // the memory behind a pointer of the device
  int index;
  int64_t bytes;
  c10::Storage host;  // the result of an operator on the host; without one, `data` was allocated here
  void* data;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(lock);
    memories[block->index].used -= block->bytes;
  }
  if (!block->host) c10::free_cpu(block->data);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const int index = here;
    const int64_t bytes = rounded(static_cast<int64_t>(n));
    claim(index, bytes);
    void* data = c10::alloc_cpu(n);
    return {data, new Block{index, bytes, {}, data}, &release, c10::Device(NPU, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator the_allocator;
REGISTER_ALLOCATOR(NPU, &the_allocator);

// Pinned memory is ordinary memory whose blocks are known.
std::map<const char*, size_t> pinned_blocks;

void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(lock);
    pinned_blocks.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = c10::alloc_cpu(n);
    if (data) {
      std::lock_guard<std::mutex> guard(lock);
      pinned_blocks[static_cast<const char*>(data)] = n;
    }
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator the_pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(lock);
  const auto* byte = static_cast<const char*>(data);
  auto after = pinned_blocks.upper_bound(byte);
  if (after == pinned_blocks.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return byte < start + size;
}

std::function<void(const std::string&)> wait_call;

// --- streams and events ---
using Id = std::pair<int, int64_t>;  // device, stream

struct Copy {
  int64_t number;
  at::Tensor source, target;  // views as tensors of the host; they keep the device's memory alive
  bool to_host;
};
struct Queue {
  std::deque<Copy> copies;
  std::map<Id, int64_t> waits_for;  // other stream -> number of its last copy that has to be done first
};
struct Event {
  Id stream;
  int64_t number;
};

std::atomic<bool> delayed{false};
std::atomic<int64_t> pending{0};
std::recursive_mutex stream_lock;
int64_t last_number = 0, last_stream = 0;
std::map<Id, Queue> queues;
thread_local std::array<int64_t, MAX_DEVICES> current{};

Id id_of(const c10::Stream& s) { return {s.device_index(), s.id()}; }

void poison(const at::Tensor& t) {
  if (t.is_floating_point()) {
    const_cast<at::Tensor&>(t).fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (t.scalar_type() == at::kBool) {
    const_cast<at::Tensor&>(t).fill_(true);
  } else if (t.scalar_type() == at::kByte) {
    const_cast<at::Tensor&>(t).fill_(0xA5);
  } else {
    const_cast<at::Tensor&>(t).fill_(-91);
  }
}

// Do the copies of a stream up to `number`, and before them those of other streams that it waits for.
// for_device: do only copies to the device; copies to the host stay in the queue.
void finish(const Id& id, int64_t number, bool for_device) {
  auto found = queues.find(id);
  if (found == queues.end()) return;
  auto& queue = found->second;
  auto before = queue.waits_for;
  if (!for_device) queue.waits_for.clear();
  static std::set<Id> under_way;  // two streams may each wait for earlier copies of the other
  if (!under_way.insert(id).second) return;
  for (const auto& [other, until] : before)
    if (other != id) finish(other, until, for_device);
  under_way.erase(id);
  std::deque<Copy> kept;
  for (auto& copy : queue.copies) {
    if (copy.number > number || (for_device && copy.to_host)) {
      kept.push_back(std::move(copy));
      continue;
    }
    copy.target.copy_(copy.source);
    --pending;
  }
  queue.copies.swap(kept);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using D = c10::Device;
  using S = c10::Stream;
  static constexpr auto ALL = std::numeric_limits<int64_t>::max();
  static int index(D d) { return d.has_index() ? d.index() : here; }
  static S stream(D d, int64_t id) { return S(S::UNSAFE, D(NPU, index(d)), id); }

  c10::DeviceType type() const override { return NPU; }
  D exchangeDevice(D d) const override {
    D before(NPU, here);
    setDevice(d);
    return before;
  }
  D getDevice() const override { return D(NPU, here); }
  void setDevice(D d) const override { set_device(index(d)); }
  void uncheckedSetDevice(D d) const noexcept override { here = index(d); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  S getStream(D d) const override { return stream(d, current[index(d)]); }
  S getDefaultStream(D d) const override { return stream(d, 0); }
  S getStreamFromGlobalPool(D d, bool = false) const override { return getNewStream(d); }
  S getNewStream(D d, int = 0) const override {
    std::lock_guard<std::recursive_mutex> guard(stream_lock);
    return stream(d, ++last_stream);
  }
  S exchangeStream(S s) const override {
    S before = getStream(s.device());
    current[s.device_index()] = s.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const S& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(stream_lock);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = Event{id_of(s), last_number};
  }
  void block(void* event, const S& s) const override {
    if (!event) return;
    std::lock_guard<std::recursive_mutex> guard(stream_lock);
    const auto& e = *static_cast<Event*>(event);
    auto& number = queues[id_of(s)].waits_for[e.stream];
    number = std::max(number, e.number);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard<std::recursive_mutex> guard(stream_lock);
    const auto& e = *static_cast<Event*>(event);
    auto found = queues.find(e.stream);
    if (found == queues.end() || found->second.copies.empty()) return true;
    return found->second.copies.front().number > e.number;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_wait("event");
    std::lock_guard<std::recursive_mutex> guard(stream_lock);
    const auto& e = *static_cast<Event*>(event);
    finish(e.stream, e.number, false);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  bool queryStream(const S& s) const override {
    std::lock_guard<std::recursive_mutex> guard(stream_lock);
    auto found = queues.find(id_of(s));
    return found == queues.end() || found->second.copies.empty();
  }
  void synchronizeStream(const S& s) const override {
    count_wait("stream");
    synchronize_stream(s);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    count_wait("device");
    synchronize_device(d);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const S&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  c10::DeviceIndex getCurrentDevice() const override { return here; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    int before = here;
    set_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(NPU, here); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generator(d < 0 ? here : d); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* storage = s.unsafeGetStorageImpl();
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    const c10::Device where = storage->device();
    c10::DataPtr data(nullptr, where);
    if (n != 0) {
      c10::DeviceGuard guard(where);
      data = the_allocator.allocate(n);
      if (storage->nbytes()) std::memcpy(data.get(), storage->data(), std::min(n, storage->nbytes()));
    }
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(n);
  }
};
}  // namespace

void on_wait(std::function<void(const std::string&)> call) { wait_call = std::move(call); }
void count_wait(const std::string& cause) {
  if (wait_call) wait_call(cause);
}

void set_devices(int count, int64_t limit) {
  TORCH_CHECK(count >= 0 && count <= MAX_DEVICES, "at most ", MAX_DEVICES, " devices, not ", count);
  std::lock_guard<std::mutex> guard(lock);
  devices = count;
  for (auto& m : memories) m.limit = limit;
}
int count_devices() { return devices; }
int current_device() { return here; }
void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < devices, "Invalid device ID ", index, ": this process sees ", devices);
  here = index;
}
Memory memory_of(int index) {
  std::lock_guard<std::mutex> guard(lock);
  return memories.at(index);
}
void reset_peak(int index) {
  std::lock_guard<std::mutex> guard(lock);
  memories.at(index).peak = memories.at(index).used;
}
c10::Allocator* allocator() { return &the_allocator; }

at::Tensor adopt(const at::Tensor& host, int index) {
  const auto bytes = static_cast<int64_t>(host.storage().nbytes());
  claim(index, rounded(bytes));
  auto* block = new Block{index, rounded(bytes), host.storage(), nullptr};
  void* data = const_cast<void*>(host.storage().data());
  c10::DataPtr pointer(data, block, &release, c10::Device(NPU, index));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), &the_allocator, true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return tensor;
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != NPU) return tensor;
  auto* kept = new c10::Storage(tensor.storage());
  c10::DataPtr pointer(const_cast<void*>(kept->data()), kept,
                       [](void* s) { delete static_cast<c10::Storage*>(s); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(pointer), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

const at::Generator& generator(int index) {
  static const auto made = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < MAX_DEVICES; ++i) all.push_back(at::detail::createCPUGenerator());
    return all;
  }();
  return made.at(index);
}
void start_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

void set_delayed(bool on) {
  if (!on)
    for (int i = 0; i < devices; ++i) synchronize_device(i);
  delayed = on;
}
bool is_delayed() { return delayed; }
int64_t pending_copies() { return pending; }
bool is_pending(const at::Tensor& host) {
  if (pending == 0 || !host.device().is_cpu() || !host.has_storage()) return false;
  std::lock_guard<std::recursive_mutex> guard(stream_lock);
  for (const auto& [id, queue] : queues)
    for (const auto& copy : queue.copies)
      if (copy.to_host && copy.target.storage().data() == host.storage().data()) return true;
  return false;
}
c10::Stream current_stream(int index) { return Guard::stream(c10::Device(NPU, index), current.at(index)); }

void enqueue(const at::Tensor& source, const at::Tensor& target, int index) {
  settle(index);
  const bool to_host = target.device().is_cpu();
  // A copy to the host takes the values of the device now. A copy to the device reads the host's
  // values when it is done, so that a value which the host overwrites too early is seen.
  auto from = to_host ? host_view(source).to(target.scalar_type(), false, true) : source.detach();
  auto into = host_view(target);
  poison(into);
  std::lock_guard<std::recursive_mutex> guard(stream_lock);
  queues[{index, current.at(index)}].copies.push_back({++last_number, from, into, to_host});
  ++pending;
}
void settle(int index) {
  if (pending == 0) return;
  std::lock_guard<std::recursive_mutex> guard(stream_lock);
  c10::NoGradGuard no_grad;
  finish({index, current.at(index)}, Guard::ALL, true);
}
void synchronize_stream(const c10::Stream& s) {
  if (pending == 0) return;
  std::lock_guard<std::recursive_mutex> guard(stream_lock);
  c10::NoGradGuard no_grad;
  finish(id_of(s), Guard::ALL, false);
}
void synchronize_device(int index) {
  if (pending == 0) return;
  std::lock_guard<std::recursive_mutex> guard(stream_lock);
  c10::NoGradGuard no_grad;
  std::vector<Id> ids;
  for (const auto& [id, queue] : queues)
    if (id.first == index) ids.push_back(id);
  for (const auto& id : ids) finish(id, Guard::ALL, false);
}

}  // namespace sim

// A pretend CUDA device for a CPU build of torch. See __init__.py for what it is for.
//
// Device memory is host memory behind a CUDA storage. Every operator is a boxed fallback on the CUDA dispatch key: it
// refuses what a GPU would refuse, runs the CPU kernel over aliases of the same memory, and keeps the books (waits of the
// host, bytes, copies under way).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;

constexpr size_t BLOCK = 512;  // what CUDA's caching allocator rounds to

struct Books {
  std::recursive_mutex mutex;
  size_t held = 0, peak = 0, limit = size_t(80) << 30, allocations = 0;
  std::map<std::string, long> ops;       // operators that ran on the device
  std::vector<std::string> waits;        // why the host waited
  std::set<const void*> pinned;          // beginnings of pinned blocks
  bool shapes_only = false;              // float operators give shapes, not values
  bool lag = true;                       // copies that do not block happen as late as a GPU may be
  py::object* on_wait = nullptr;
};
Books& books() {
  static Books* kept = new Books();
  return *kept;
}

// ---- copies that do not block ------------------------------------------------------------------------------------

struct Pending {
  at::Tensor to, from;  // as CPU aliases, which hold the memory
  const void *to_storage, *from_storage;
};
std::list<Pending>& pending() {
  static auto* kept = new std::list<Pending>();
  return *kept;
}

void perform(Pending& one) { one.to.copy_(one.from); }

void finish_all() {
  std::lock_guard<std::recursive_mutex> guard(books().mutex);
  auto& all = pending();
  while (!all.empty()) {
    Pending one = all.front();
    all.pop_front();
    perform(one);
  }
}

void finish_those_of(const std::set<const void*>& storages) {
  std::lock_guard<std::recursive_mutex> guard(books().mutex);
  auto& all = pending();
  bool due = false;
  for (auto& one : all) due = due || storages.count(one.to_storage) || storages.count(one.from_storage);
  if (due) finish_all();  // a stream is in order
}

void wait(const std::string& why) {
  finish_all();
  std::lock_guard<std::recursive_mutex> guard(books().mutex);
  books().waits.push_back(why);
  if (books().on_wait && Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    (*books().on_wait)(why);
  }
}

// ---- memory ------------------------------------------------------------------------------------------------------

struct Region {
  void* start;
  size_t bytes;
};
size_t rounded(size_t bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

void release(void* context) {
  auto* region = static_cast<Region*>(context);
  {
    std::lock_guard<std::recursive_mutex> guard(books().mutex);
    books().held -= rounded(region->bytes);
  }
  munmap(region->start, rounded(region->bytes));
  delete region;
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    const Device here(DeviceType::CUDA, 0);
    if (bytes == 0) return {nullptr, nullptr, &release, here};
    {
      std::lock_guard<std::recursive_mutex> guard(books().mutex);
      auto& b = books();
      if (b.held + rounded(bytes) > b.limit)
        C10_THROW_ERROR(
            OutOfMemoryError,
            "CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes, of " + std::to_string(b.limit) +
                " held are " + std::to_string(b.held));
      b.held += rounded(bytes);
      b.peak = std::max(b.peak, b.held);
      ++b.allocations;
    }
    void* start = mmap(nullptr, rounded(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "pretend GPU: no address space for ", bytes, " bytes");
    auto* region = new Region{start, bytes};
    if (!books().shapes_only) {  // what nobody has written is no zero
      auto* words = static_cast<uint32_t*>(start);
      for (size_t i = 0; i < bytes / 4; ++i) words[i] = 0x7fc0dead;  // NaN in fp32, a large integer
    }
    return {start, region, &release, here};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};
DeviceAllocator& device_allocator() {
  static auto* kept = new DeviceAllocator();
  return *kept;
}

void release_pinned(void* start) {
  {
    std::lock_guard<std::recursive_mutex> guard(books().mutex);
    finish_all();  // CUDA's pinned blocks live until copies from them are done
    books().pinned.erase(start);
  }
  free(start);
}
struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, std::max<size_t>(bytes, 64)) == 0, "no memory to pin");
    std::lock_guard<std::recursive_mutex> guard(books().mutex);
    books().pinned.insert(start);
    return {start, start, &release_pinned, Device(DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};
PinnedAllocator& pinned_allocator() {
  static auto* kept = new PinnedAllocator();
  return *kept;
}

bool is_pinned(const at::Tensor& tensor) {
  std::lock_guard<std::recursive_mutex> guard(books().mutex);
  return tensor.has_storage() && books().pinned.count(tensor.storage().data());
}

// ---- draws -------------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(uint64_t seed)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { at_offset = offset; }
  uint64_t get_offset() const override { return at_offset; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override {
    auto random = c10::detail::getNonDeterministicRandom();
    inner.set_current_seed(random);
    return random;
  }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(0);
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
  uint64_t at_offset = 0;
};
at::Generator& default_generator() {
  static auto* kept = new at::Generator(at::make_generator<DeviceGenerator>(c10::default_rng_seed_val));
  return *kept;
}

// ---- what torch asks of a device ---------------------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(c10::default_rng_seed_val);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::recursive_mutex> guard(books().mutex);
    return books().pinned.count(data);
  }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize(DeviceIndex) const override { wait("synchronize"); }
};

c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return the_stream(); }
  c10::Stream getDefaultStream(Device) const override { return the_stream(); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return the_stream(); }
  c10::Stream getNewStream(Device, int) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return the_stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return pending().empty(); }
  bool queryStream(const c10::Stream&) const override { return pending().empty(); }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize a stream"); }
  void synchronizeEvent(void*) const override { wait("synchronize an event"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("synchronize"); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

// ---- operators ---------------------------------------------------------------------------------------------------

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DeviceType::CUDA; }

// The same memory as a CPU tensor; it holds the device's tensor.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  // const: to read a lazily shared storage for writing would take a copy
  void* start = const_cast<void*>(tensor.const_data_ptr());
  at::Tensor kept = tensor.detach();
  auto alias = at::for_blob(start, tensor.sizes())
                   .strides(tensor.strides())
                   .deleter([kept](void*) {})
                   .options(options)
                   .make_tensor();
  if (tensor.is_conj()) alias._set_conj(true);
  return alias;
}

at::Tensor empty_like_of(const at::Tensor& cpu) {
  return at::detail::empty_strided_generic(
      cpu.sizes(), cpu.strides(), &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), cpu.scalar_type());
}

void answer_yes(const at::Tensor& shape_alone) {  // to whatever is asked of values that are not there; the first of all is chosen
  if (shape_alone.scalar_type() == at::kBool) as_cpu(shape_alone).fill_(true);
  else if (at::isIntegralType(shape_alone.scalar_type(), false)) as_cpu(shape_alone).zero_();
}

at::Tensor to_device(const at::Tensor& cpu) {
  if (!cpu.defined() || on_device(cpu)) return cpu;
  auto out = empty_like_of(cpu);
  if (!cpu.numel()) return out;
  if (!cpu.is_meta()) as_cpu(out).copy_(cpu);
  else answer_yes(out);
  return out;
}

// Operators on a GPU that end only when their result is on the host, because its size depends on values, or because
// they check values.
const std::set<std::string>& waiting() {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::bincount", "aten::equal", "aten::multinomial", "aten::repeat_interleave", "aten::_assert_scalar",
      "aten::linalg_eigh", "aten::_linalg_svd"};
  return names;
}

bool allows_host_tensors(const std::string& name) {  // indices may be of the host
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put";
}

void refuse_mixture(const std::string& name, const std::vector<at::Tensor>& tensors) {
  if (allows_host_tensors(name)) return;
  for (const auto& one : tensors)
    TORCH_CHECK(
        !one.defined() || on_device(one) || (one.dim() == 0 && one.device().is_cpu()) || one.device().is_meta(),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ", one.device(), "! (",
        name, ")");
}

bool any_float(const std::vector<at::Tensor>& tensors) {
  for (const auto& one : tensors)
    if (one.defined() && (at::isFloatingType(one.scalar_type()) || at::isComplexType(one.scalar_type()))) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  const auto name = op.operator_name().name;
  const size_t begin = stack->size() - formal.size();

  std::vector<at::Tensor> tensors;
  std::set<const void*> storages;
  auto note = [&](const at::Tensor& one) {
    tensors.push_back(one);
    if (on_device(one) && one.has_storage()) storages.insert(one.storage().unsafeGetStorageImpl());
  };
  for (size_t i = 0; i < formal.size(); ++i) {
    const IValue& value = (*stack)[begin + i];
    if (value.isTensor()) note(value.toTensor());
    else if (value.isTensorList()) for (const at::Tensor one : value.toTensorList()) note(one);
    else if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor> one : value.toOptionalTensorList()) if (one) note(*one);
  }
  refuse_mixture(name, tensors);
  finish_those_of(storages);
  {
    std::lock_guard<std::recursive_mutex> guard(books().mutex);
    ++books().ops[name];
  }
  bool waits = waiting().count(name) > 0;
  if (name == "aten::repeat_interleave") {  // with output_size it need not wait
    for (size_t i = 0; i < formal.size(); ++i)
      if (formal[i].name() == "output_size" && !(*stack)[begin + i].isNone()) waits = false;
  }
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_")
    for (const auto& one : tensors)
      if (one.defined() && one.dim() > 0 && one.scalar_type() == at::kBool && tensors.front().unsafeGetTensorImpl() != one.unsafeGetTensorImpl())
        waits = true;
  if (waits) wait(name);

  const bool shapes = books().shapes_only && any_float(tensors);
  auto there = [&](const at::Tensor& one) -> at::Tensor {
    if (!one.defined()) return one;
    if (!shapes) return as_cpu(one);
    return at::empty_strided(one.sizes(), one.strides(), one.options().device(at::kMeta));
  };

  // Arguments that are written: where each alias set begins, and what stands for it on the CPU.
  std::map<c10::Symbol, at::Tensor> written, stand_ins;
  std::map<c10::Symbol, std::vector<at::Tensor>> written_lists;
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;
  for (size_t i = 0; i < formal.size(); ++i) {
    IValue& value = (*stack)[begin + i];
    const auto* alias = formal[i].alias_info();
    const bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      const at::Tensor own = value.toTensor();
      at::Tensor cpu;
      if (writes && formal[i].kwarg_only() && on_device(own)) {  // out=: may be resized
        cpu = at::empty({0}, own.options().device(shapes ? at::kMeta : at::kCPU));
        outs.emplace_back(own, cpu);
      } else {
        cpu = there(own);
      }
      if (writes && !alias->beforeSets().empty()) written[*alias->beforeSets().begin()] = own;
      value = cpu;
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      std::vector<at::Tensor> own;
      for (const at::Tensor one : value.toTensorList()) {
        own.push_back(one);
        list.push_back(there(one));
      }
      if (writes && !alias->beforeSets().empty()) written_lists[*alias->beforeSets().begin()] = own;
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        if (shapes && one && one->scalar_type() == at::kBool) {  // its values are there, and say how many are chosen
          const auto count = as_cpu(*one).sum().item<int64_t>();
          for (int64_t i = 0; i < one->dim(); ++i) list.push_back(at::empty({count}, at::device(at::kMeta).dtype(at::kLong)));
        } else {
          list.push_back(one ? std::optional<at::Tensor>(there(*one)) : std::nullopt);
        }
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = Device(shapes ? DeviceType::Meta : DeviceType::CPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(
          value.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
      value = static_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
    } else if (value.isNone() && formal[i].name() == "generator") {
      value = static_cast<DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())->inner;
    }
  }
  at::RecordFunctionGuard unseen(false);  // a profiler sees the device's operator, not the CPU's below it
  op.redispatchBoxed(c10::DispatchKeySet(shapes ? c10::DispatchKey::Meta : c10::DispatchKey::CPU), stack);

  for (auto& [own, cpu] : outs) {
    at::native::resize_output(own, cpu.sizes());
    if (own.numel()) shapes ? answer_yes(own) : void(as_cpu(own).copy_(cpu));
  }
  const auto& returned = schema.returns();
  const size_t first = stack->size() - returned.size();
  for (size_t i = 0; i < returned.size(); ++i) {
    IValue& value = (*stack)[first + i];
    const auto* alias = returned[i].alias_info();
    const bool wrote = alias && alias->isWrite() && !alias->beforeSets().empty();
    if (value.isTensor()) {
      if (wrote) value = written.at(*alias->beforeSets().begin());
      else value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      if (wrote) {
        c10::List<at::Tensor> list;
        for (const auto& one : written_lists.at(*alias->beforeSets().begin())) list.push_back(one);
        value = list;
      } else {
        c10::List<at::Tensor> list;
        for (const at::Tensor one : value.toTensorList()) list.push_back(to_device(one));
        value = list;
      }
    }
  }
}

at::Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (on_device(self) && on_device(source)) {
    finish_those_of({self.storage().unsafeGetStorageImpl(), source.storage().unsafeGetStorageImpl()});
    if (!(books().shapes_only && at::isFloatingType(self.scalar_type()))) as_cpu(self).copy_(as_cpu(source));
    return self;
  }
  const bool down = on_device(source);
  const at::Tensor& host = down ? self : source;
  const at::Tensor& device = down ? source : self;
  const bool skip = books().shapes_only && host.nbytes() > (1 << 20);
  if (skip) return down ? self.zero_() : self;
  if (non_blocking && books().lag && is_pinned(host)) {
    if (down && host.is_non_overlapping_and_dense()) memset(host.mutable_data_ptr(), 0x7f, host.nbytes());  // not there yet
    std::lock_guard<std::recursive_mutex> guard(books().mutex);
    const void* of_device = device.storage().unsafeGetStorageImpl();
    // Where types or strides differ, a GPU would copy through a temporary; what it holds is what the memory holds then.
    pending().push_back({as_cpu(self), as_cpu(source), of_device, of_device});
    return self;
  }
  if (down || !non_blocking) wait(down ? "copy to the host" : "copy to the device");
  finish_those_of({device.storage().unsafeGetStorageImpl()});
  as_cpu(self).copy_(as_cpu(source));
  return self;
}

// The mask has values where numbers have shapes alone.
at::Tensor masked_select(const at::Tensor& self, const at::Tensor& mask) {
  refuse_mixture("aten::masked_select", {self, mask});
  finish_those_of({self.storage().unsafeGetStorageImpl(), mask.storage().unsafeGetStorageImpl()});
  wait("aten::masked_select");
  if (!books().shapes_only) return to_device(at::masked_select(as_cpu(self), as_cpu(mask)));
  return at::empty({as_cpu(mask).expand(at::infer_size(self.sizes(), mask.sizes())).sum().item<int64_t>()}, self.options());
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  wait("item");
  return at::_local_scalar_dense(as_cpu(self));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> dense(size.size(), 1);
  for (int64_t i = int64_t(size.size()) - 2; i >= 0; --i) dense[i] = dense[i + 1] * std::max<int64_t>(size[i + 1], 1);
  impl->set_sizes_and_strides(size, stride.empty() && !size.empty() ? at::IntArrayRef(dense) : stride, offset);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto empty = empty_memory_format({0}, self.scalar_type(), {}, {}, {}, {});
  return set_tensor(self, empty);
}
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}

// Attention: the composite operator asks which kernel is to run, and calls that of CUDA by its own name.
int64_t fused_sdp_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double,
    bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const auto& context = at::globalContext();
  const bool alike = query.size(-1) == value.size(-1) && query.size(-1) <= 256;
  const bool learned_mask = mask && mask->requires_grad();
  if (half && !mask && alike && context.userEnabledFlashSDP()) return 1;
  if (alike && !learned_mask && context.userEnabledMemEfficientSDP()) return 2;
  if (context.userEnabledMathSDP()) return 0;
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}
// Attention with dropout, for which the CPU has no fused kernel: by the formula. The mask follows from a seed that the
// forward pass draws from the device's generator and hands to the backward pass.
struct Dropped {
  at::Tensor q, k, v, share, kept;  // share: softmax of the scores; kept: 0, or 1 / (1 - p)
  double scale;
  int64_t groups;
  Dropped(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
          double p, bool causal, std::optional<double> given, int64_t seed)
      : scale(given.value_or(1 / std::sqrt(double(query.size(-1))))), groups(query.size(1) / key.size(1)) {
    auto wide = [&](const at::Tensor& one) { return as_cpu(one).to(at::kFloat).repeat_interleave(groups, 1); };
    q = as_cpu(query).to(at::kFloat), k = wide(key), v = wide(value);
    auto scores = at::matmul(q, k.transpose(-2, -1)) * scale;
    if (bias) scores += as_cpu(*bias);
    if (causal) scores.masked_fill_(at::ones({q.size(2), k.size(2)}, at::kBool).triu(1), -INFINITY);
    share = scores.softmax(-1);
    kept = at::empty(share.sizes(), at::kFloat).bernoulli_(1 - p, at::detail::createCPUGenerator(seed)) / (1 - p);
  }
  at::Tensor out() const { return at::matmul(share * kept, v); }
  std::array<at::Tensor, 3> back(const at::Tensor& gradient) const {
    const auto g = as_cpu(gradient).to(at::kFloat);
    const auto inner = at::matmul(g, v.transpose(-2, -1)) * kept;
    const auto scores = share * (inner - (inner * share).sum(-1, true)) * scale;
    auto narrow = [&](const at::Tensor& one) {
      return one.view({one.size(0), one.size(1) / groups, groups, one.size(2), one.size(3)}).sum(2);
    };
    return {at::matmul(scores, k), narrow(at::matmul(scores.transpose(-2, -1), q)), narrow(at::matmul((share * kept).transpose(-2, -1), g))};
  }
};
std::tuple<at::Tensor, at::Tensor, at::Tensor> dropped_back(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bias, double p, bool causal, std::optional<double> scale, const at::Tensor& seed) {
  auto found = Dropped(query, key, value, bias, p, causal, scale, seed.item<int64_t>()).back(grad);
  const auto type = query.scalar_type();
  return {to_device(found[0].to(type)), to_device(found[1].to(type)), to_device(found[2].to(type))};
}
at::Tensor drawn_seed(double dropout) {  // [2], as flash's
  auto seed = at::zeros({2}, at::kLong);
  if (dropout > 0) seed[0].random_(static_cast<DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())->inner);
  return seed;
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout, bool causal, bool,
    std::optional<double> scale) {
  at::Tensor out, lse, seed = drawn_seed(dropout);
  if (books().shapes_only || dropout > 0) {
    out = at::empty_like(query);
    lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
    at::RecordFunctionGuard unseen(false);
    if (!books().shapes_only) as_cpu(out).copy_(Dropped(query, key, value, {}, dropout, causal, scale, seed[0].item<int64_t>()).out());
  } else {
    at::RecordFunctionGuard unseen(false);
    auto found = at::_scaled_dot_product_flash_attention_for_cpu(as_cpu(query), as_cpu(key), as_cpu(value), dropout, causal, {}, scale);
    out = to_device(std::get<0>(found));
    lse = to_device(std::get<1>(found));
  }
  return {out, lse, at::Tensor(), at::Tensor(), query.sym_size(2), key.sym_size(2), to_device(seed), to_device(at::zeros({}, at::kLong)), at::Tensor()};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
    const at::Tensor& lse, const at::Tensor&, const at::Tensor&, int64_t, int64_t, double dropout, bool causal,
    const at::Tensor& seed, const at::Tensor&, std::optional<double> scale) {
  if (books().shapes_only) return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
  at::RecordFunctionGuard unseen(false);
  if (dropout > 0) return dropped_back(grad, query, key, value, {}, dropout, causal, scale, as_cpu(seed)[0]);
  auto found = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_cpu(grad), as_cpu(query), as_cpu(key), as_cpu(value), as_cpu(out), as_cpu(lse), dropout, causal, {}, scale);
  return {to_device(std::get<0>(found)), to_device(std::get<1>(found)), to_device(std::get<2>(found))};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, bool,
    double dropout, bool causal, std::optional<double> scale) {
  at::Tensor out, lse, seed = drawn_seed(dropout);
  if (books().shapes_only || dropout > 0) {
    out = at::empty_like(query);
    lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
    at::RecordFunctionGuard unseen(false);
    if (!books().shapes_only) as_cpu(out).copy_(Dropped(query, key, value, mask, dropout, causal, scale, seed[0].item<int64_t>()).out());
  } else {
    std::optional<at::Tensor> bias = mask ? std::optional<at::Tensor>(as_cpu(*mask)) : std::nullopt;
    at::RecordFunctionGuard unseen(false);
    auto found = at::_scaled_dot_product_flash_attention_for_cpu(
        as_cpu(query), as_cpu(key), as_cpu(value), dropout, causal, bias, scale);
    out = to_device(std::get<0>(found));
    lse = to_device(std::get<1>(found));
  }
  return {out, lse, to_device(seed[0].clone()), to_device(at::zeros({}, at::kLong))};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& seed, const at::Tensor&, double dropout, std::array<bool, 4>,
    bool causal, std::optional<double> scale) {
  if (books().shapes_only) return {at::empty_like(query), at::empty_like(key), at::empty_like(value), at::Tensor()};
  std::optional<at::Tensor> bias = mask.defined() ? std::optional<at::Tensor>(as_cpu(mask)) : std::nullopt;
  at::RecordFunctionGuard unseen(false);
  if (dropout > 0) {
    auto [dq, dk, dv] = dropped_back(grad, query, key, value, bias, dropout, causal, scale, as_cpu(seed));
    return {dq, dk, dv, at::Tensor()};
  }
  auto found = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_cpu(grad), as_cpu(query), as_cpu(key), as_cpu(value), as_cpu(out), as_cpu(lse), dropout, causal, bias, scale);
  return {to_device(std::get<0>(found)), to_device(std::get<1>(found)), to_device(std::get<2>(found)), at::Tensor()};
}
// On a GPU dropout draws from the device's generator; the CPU's kernel would take the host's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input, at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// A GPU counts integers as well, and looks for the bounds only where none are given.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (min.toDouble() == max.toDouble()) wait("aten::histc");
  finish_those_of({self.storage().unsafeGetStorageImpl()});
  at::RecordFunctionGuard unseen(false);
  return to_device(at::histc(as_cpu(self).to(at::kDouble), bins, min, max).to(self.scalar_type()));
}

// An operator that only GPUs have.
at::Tensor depthwise(
    const at::Tensor& self, const at::Tensor& weight, at::IntArrayRef, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation) {
  refuse_mixture("aten::_conv_depthwise2d", {self, weight});
  if (books().shapes_only) {
    std::vector<int64_t> sizes{self.size(0), weight.size(0)};
    for (int i : {0, 1})
      sizes.push_back((self.size(2 + i) + 2 * padding[i] - dilation[i] * (weight.size(2 + i) - 1) - 1) / stride[i] + 1);
    return at::empty(sizes, self.options());
  }
  finish_those_of({self.storage().unsafeGetStorageImpl()});
  at::RecordFunctionGuard unseen(false);
  auto own = bias ? std::optional<at::Tensor>(as_cpu(*bias)) : std::nullopt;
  return to_device(at::conv2d(as_cpu(self), as_cpu(weight), own, stride, padding, dilation, self.size(1)));
}

// Rows of several documents: query [tokens, heads, width], keys and values with as many heads or fewer.
at::Tensor document(const at::Tensor& all, int64_t from, int64_t to, int64_t groups) {  // [1, heads, length, width]
  auto one = as_cpu(all).slice(0, from, to).transpose(0, 1).unsqueeze(0);
  return groups == 1 ? one : one.repeat_interleave(groups, 1);
}
at::Tensor grouped(const at::Tensor& gradient, int64_t groups) {  // back to [length, heads of keys, width]
  auto one = gradient.squeeze(0);
  if (groups > 1) one = one.view({one.size(0) / groups, groups, one.size(1), one.size(2)}).sum(1);
  return one.transpose(0, 1);
}
void refuse_full_precision(const at::Tensor& query) {
  TORCH_CHECK(
      query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16,
      "FlashAttention only support fp16 and bf16 data type");
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> varlen_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& ends,
    const std::optional<at::Tensor>&, c10::SymInt, c10::SymInt, double, bool causal, bool, std::optional<double> scale,
    std::optional<c10::SymInt>, std::optional<c10::SymInt> right, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, std::optional<int64_t>) {
  refuse_mixture("aten::_flash_attention_forward", {query, key, value, *ends});
  refuse_full_precision(query);
  auto out = at::empty_like(query);
  auto lse = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  auto state = to_device(at::zeros({2}, at::kLong)), unused = to_device(at::zeros({}, at::kLong));
  if (books().shapes_only) return {out, lse, state, unused, at::Tensor()};
  at::RecordFunctionGuard unseen(false);
  causal = causal || (right && right->expect_int() == 0);
  const auto bounds = as_cpu(*ends);
  const auto groups = query.size(1) / key.size(1);
  for (int64_t i = 0; i + 1 < bounds.size(0); ++i) {
    const auto from = bounds[i].item<int64_t>(), to = bounds[i + 1].item<int64_t>();
    if (from == to) continue;
    auto found = at::_scaled_dot_product_flash_attention_for_cpu(
        document(query, from, to, 1), document(key, from, to, groups), document(value, from, to, groups), 0.0, causal, {}, scale);
    as_cpu(out).slice(0, from, to).copy_(std::get<0>(found).squeeze(0).transpose(0, 1));
  }
  return {out, lse, state, unused, at::Tensor()};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor&,
    const at::Tensor&, const at::Tensor& ends, const at::Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const at::Tensor&,
    const at::Tensor&, std::optional<double> scale, std::optional<c10::SymInt>, std::optional<c10::SymInt> right) {
  auto dq = at::zeros_like(query), dk = at::zeros_like(key), dv = at::zeros_like(value);
  if (books().shapes_only) return {dq, dk, dv};
  at::RecordFunctionGuard unseen(false);
  causal = causal || (right && right->expect_int() == 0);
  const auto bounds = as_cpu(ends);
  const auto groups = query.size(1) / key.size(1);
  for (int64_t i = 0; i + 1 < bounds.size(0); ++i) {
    const auto from = bounds[i].item<int64_t>(), to = bounds[i + 1].item<int64_t>();
    if (from == to) continue;
    auto q = document(query, from, to, 1), k = document(key, from, to, groups), v = document(value, from, to, groups);
    auto again = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, {}, scale);
    auto found = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        document(grad, from, to, 1), q, k, v, std::get<0>(again), std::get<1>(again), 0.0, causal, {}, scale);
    as_cpu(dq).slice(0, from, to).copy_(grouped(std::get<0>(found), 1));
    as_cpu(dk).slice(0, from, to).copy_(grouped(std::get<1>(found), groups));
    as_cpu(dv).slice(0, from, to).copy_(grouped(std::get<2>(found), groups));
  }
  return {dq, dk, dv};
}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace {
const bool sdp_choice_is_known = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fused_sdp_choice);
  return true;
}();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize_);
  m.impl("native_dropout", &native_dropout);
  m.impl("histc", &histc);
  m.impl("masked_select", &masked_select);
  m.impl("_conv_depthwise2d", &depthwise);
  // torch would ask the tensor's device for kernels of its own, below the dispatcher.
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("_scaled_dot_product_flash_attention", &flash_forward);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  m.impl("_flash_attention_forward", &varlen_forward);
  m.impl("_flash_attention_backward", &varlen_backward);
  m.impl("_scaled_dot_product_efficient_attention", &efficient_forward);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

// bitsandbytes' CPU kernels stand in for its CUDA kernels, which are not loaded (site/sitecustomize.py). These operators it
// also has in plain torch, which would be taken instead.
TORCH_LIBRARY_IMPL(bitsandbytes, CUDA, m) {
  for (const char* name :
       {"quantize_4bit", "dequantize_4bit", "gemm_4bit", "quantize_blockwise", "dequantize_blockwise", "int8_vectorwise_quant",
        "optimizer_update_32bit"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("waits", [] { std::lock_guard<std::recursive_mutex> g(books().mutex); return books().waits; });
  m.def("clear", [] {
    std::lock_guard<std::recursive_mutex> g(books().mutex);
    books().waits.clear();
    books().ops.clear();
  });
  m.def("ops", [] { std::lock_guard<std::recursive_mutex> g(books().mutex); return books().ops; });
  m.def("memory", [] {
    std::lock_guard<std::recursive_mutex> g(books().mutex);
    auto& b = books();
    return std::map<std::string, size_t>{{"held", b.held}, {"peak", b.peak}, {"limit", b.limit}, {"allocations", b.allocations}};
  });
  m.def("set_limit", [](size_t bytes) { books().limit = bytes; });
  m.def("reset_peak", [] { books().peak = books().held; });
  m.def("synchronize", [] { py::gil_scoped_release nogil; wait("synchronize"); });
  m.def("set_shapes_only", [](bool on) { books().shapes_only = on; });
  m.def("set_lag", [](bool on) { books().lag = on; });
  m.def("set_on_wait", [](py::object call) {
    delete books().on_wait;
    books().on_wait = call.is_none() ? nullptr : new py::object(call);
  });
  m.def("default_generator", [] { return default_generator(); });
}

// A cluster of CTAs of a Hopper GPU on a CPU, for hopper_on_cpu.py: it stands for the device pieces of moefp8, which
// are PTX. Threads are fibers. Which runs next is drawn; so is when TMA copies and when WGMMAs read and write, within
// what the hardware may do: at any time between asking and waiting. A kernel that waits for too little, or for the
// wrong phase, is wrong here for some seeds, or never ends.
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Index {
  int x;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static Index threadIdx, blockIdx, gridDim;
template <class A, class B>
auto min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}

// ---- The cluster that runs ----

constexpr int kMaxCtas = 2, kMaxThreads = 512, kCtaBytes = 1 << 18;  // also: where a CTA's shared memory ends
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::function<bool()> may_run;
  bool is_over = true;
};
struct Meeting {  // of threads that wait for each other: the last one to come does `end`
  int arrived = 0, round = 0;
};
struct Task {  // what TMA was asked for, by a thread of a CTA
  int cta, thread;
  bool is_store, is_committed;
  std::function<void()> run;
};
struct Product {  // a WGMMA of a thread: its part of it
  float* d;
  int n;
  uint64_t a, b;
  bool accumulate;
};
static uint8_t* shared_memory;  // of all CTAs
static int num_ctas, num_threads, current_cta;
static Fiber fibers[kMaxCtas][kMaxThreads];
static std::vector<std::vector<Product>> groups[kMaxCtas][kMaxThreads];  // the last one is not committed yet
static Meeting named[kMaxCtas][16], warps[kMaxCtas][kMaxThreads / 32], all_ctas;
static int slowness[kMaxCtas][kMaxThreads / 32];  // of each warp
static std::vector<Task> tasks;
static std::mt19937 order;
static ucontext_t scheduler;
static std::string fault;

inline bool draw(int one_in) { return order() % one_in == 0; }
inline void fail(const char* what) {
  if (fault.empty()) fault = what;
}
inline Fiber& self() { return fibers[current_cta][threadIdx.x]; }
inline bool is_over(int cta) {
  return std::all_of(fibers[cta], fibers[cta] + num_threads, [](const Fiber& x) { return x.is_over; });
}
inline void yield_until(std::function<bool()> may_run) {
  const int cta = current_cta;
  const Index thread = threadIdx, block = blockIdx;
  self().may_run = std::move(may_run);
  swapcontext(&self().context, &scheduler);
  current_cta = cta, threadIdx = thread, blockIdx = block;
}
inline void meet(Meeting& meeting, int size, const std::function<void()>& end = [] {}) {
  const int round = meeting.round;
  if (++meeting.arrived == size) {
    meeting.arrived = 0, ++meeting.round;
    end();
  }
  yield_until([&meeting, round] { return meeting.round != round; });
}
inline void __syncthreads() { meet(named[current_cta][0], num_threads); }
inline int lane() { return threadIdx.x % 32; }

// ---- base.cuh ----

constexpr int kWarp = 32, kWarpgroup = 128;
inline uint32_t shared_address(const void* pointer) { return static_cast<const uint8_t*>(pointer) - shared_memory; }
inline int warp_uniform(int value) { return value; }
inline bool elect_one() { return lane() == threadIdx.x / 32 % 32; }
template <int kThreads>
void named_barrier(int id) {
  meet(named[current_cta][id], kThreads);
}
template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}
inline uint32_t cluster_rank() { return current_cta; }
inline void cluster_arrive() {}
inline void cluster_wait() { meet(all_ctas, num_ctas * num_threads); }
inline void fence_cta() {}

// ---- mbarrier.cuh ----

struct Barrier {
  int16_t arrivals, pending;
  int32_t twice_bytes_and_parity;

  void init(uint32_t count) { *this = {int16_t(count), int16_t(count), 0}; }
  uint32_t address() const { return shared_address(this); }
  uint32_t parity() const { return twice_bytes_and_parity & 1; }
  void complete_phase_if_due() {
    if (pending == 0 && twice_bytes_and_parity >> 1 == 0) pending = arrivals, twice_bytes_and_parity ^= 1;
  }
  void expect(int bytes) {  // negative: these have come
    twice_bytes_and_parity += 2 * bytes;
    complete_phase_if_due();
  }
  void arrive() {
    if (--pending < 0) fail("a barrier has more arrivals than it was initialised for");
    complete_phase_if_due();
  }
  void arrive_and_expect(bool elected, uint32_t bytes) {
    if (elected) twice_bytes_and_parity += 2 * bytes, arrive();
  }
  Barrier& in(int cta) {
    if (is_over(cta)) fail("a signal comes to a CTA that has left");
    return *reinterpret_cast<Barrier*>(shared_memory + cta * kCtaBytes + address() % kCtaBytes);
  }
  void arrive_in_cluster(uint32_t rank) { in(rank).arrive(); }
  void wait(uint32_t parity) {
    yield_until([this, parity] { return this->parity() != parity; });
  }
};
inline void fence_barrier_init() {}

// ---- tma.cuh ----

struct L2Policy {
  static L2Policy usual() { return {}; }
};
struct alignas(64) TensorMap {
  uint64_t address, element_bytes, dimensions, shape[3], strides[3], box[3], swizzle_bytes;
  uint64_t unused[3];
};
struct Corner {
  int x, y, z;
};
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Calls visit(address in shared memory, address in memory or null where that is out of bounds) for each element.
inline void for_each_element(const TensorMap& map, uint32_t shared, Corner at,
                             const std::function<void(uint8_t*, uint8_t*)>& visit) {
  const int64_t first[3] = {at.x, at.y, map.dimensions == 3 ? at.z : 0};
  uint32_t offset = 0;
  for (uint64_t z = 0; z < map.box[2]; ++z)
    for (uint64_t y = 0; y < map.box[1]; ++y)
      for (uint64_t x = 0; x < map.box[0]; ++x, offset += map.element_bytes) {
        const uint64_t place[3] = {first[0] + x, first[1] + y, first[2] + z};
        bool exists = true;
        uint64_t address = map.address;
        for (int i = 0; i < 3; ++i) exists = exists && place[i] < map.shape[i], address += place[i] * map.strides[i];
        const uint32_t target = map.swizzle_bytes == 128 ? swizzled(shared + offset) : shared + offset;
        visit(shared_memory + target, exists ? reinterpret_cast<uint8_t*>(address) : nullptr);
      }
}
inline void load(void* destination, const TensorMap& map, Barrier& full, Corner at, unsigned ranks) {
  const uint32_t target = shared_address(destination) % kCtaBytes;
  if (target % 128 || (map.swizzle_bytes && target % 1024)) fail("a box is loaded to a wrong alignment");
  if (at.x * map.element_bytes % 16) fail("a box begins at no multiple of 16 bytes");
  for (int cta = 0; cta < num_ctas; ++cta) {
    if (!(ranks >> cta & 1)) continue;
    const auto run = [=, &full] {
      for_each_element(map, cta * kCtaBytes + target, at, [&](uint8_t* shared, uint8_t* global) {
        if (global) memcpy(shared, global, map.element_bytes);
        else memset(shared, 0, map.element_bytes);
      });
      const int bytes = map.box[0] * map.box[1] * map.box[2] * map.element_bytes;
      full.in(cta).expect(-bytes);
    };
    tasks.push_back({cta, threadIdx.x, false, true, run});
  }
}
template <int kDimensions>
void tma_load(bool elected, void* destination, const TensorMap& map, Barrier& full, Corner at, L2Policy) {
  if (map.dimensions != kDimensions) fail("a load has not the dimensions of its map");
  if (elected) load(destination, map, full, at, 1 << current_cta);
}
inline void tma_load_multicast(bool elected, void* destination, const TensorMap& map, Barrier& full, Corner at,
                               uint16_t ranks) {
  if (map.dimensions != 3) fail("a load has not the dimensions of its map");
  if (elected) load(destination, map, full, at, ranks);
}
inline void fence_for_async() {}
template <int kDimensions>
void tma_store(const TensorMap& map, const void* source, Corner at) {
  const uint32_t from = shared_address(source);
  if (from % 1024) fail("a box is stored from a wrong alignment");
  const auto run = [=] {
    for_each_element(map, from, at, [&](uint8_t* shared, uint8_t* global) {
      if (global) memcpy(global, shared, map.element_bytes);
    });
  };
  tasks.push_back({current_cta, threadIdx.x, true, false, run});
}
inline void tma_store_commit() {
  for (Task& task : tasks)
    if (task.cta == current_cta && task.thread == threadIdx.x) task.is_committed = true;
}
inline void run_task(size_t i) {
  const Task task = tasks[i];
  tasks.erase(tasks.begin() + i);
  task.run();
}
inline void tma_store_wait_read() {
  for (size_t i = 0; i < tasks.size();) {
    const Task& task = tasks[i];
    if (task.is_store && task.is_committed && task.cta == current_cta && task.thread == threadIdx.x) run_task(i);
    else ++i;
  }
}

// ---- wgmma.cuh; its functions of descriptors are its own ----

inline float decode(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return NAN;
  const float magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 128 ? -magnitude : magnitude;
}
// 32 numbers of a row of a tile.
inline void read_row(float (&values)[32], uint64_t descriptor, int row) {
  static const std::array<float, 256> of_code = [] {
    std::array<float, 256> numbers;
    for (int i = 0; i < 256; ++i) numbers[i] = decode(i);
    return numbers;
  }();
  const uint32_t start = (descriptor & 0x3fff) * 16, stride = (descriptor >> 32 & 0x3fff) * 16;
  if (descriptor >> 62 != 1) fail("a descriptor has not the 128 B swizzle");
  const uint32_t address = current_cta * kCtaBytes + start + row / 8 * stride + row % 8 * 128;
  for (int k = 0; k < 32; ++k) values[k] = of_code[shared_memory[swizzled(address + k)]];
}
inline void compute(const Product& p) {
  const int row = threadIdx.x % 128 / 32 * 16 + lane() / 4;
  float rows[2][32], column[32];
  read_row(rows[0], p.a, row), read_row(rows[1], p.a, row + 8);
  for (int i = 0; i < p.n / 4; ++i) {
    read_row(column, p.b, i / 2 * 8 + lane() % 4 * 2 + i % 2);
    for (int below = 0; below < 2; ++below) {
      float& d = p.d[i / 2 * 4 + below * 2 + i % 2];
      float sum = p.accumulate ? d : 0;
      for (int k = 0; k < 32; ++k) sum += rows[below][k] * column[k];
      d = sum;
    }
  }
}
inline std::vector<std::vector<Product>>& own_groups() { return groups[current_cta][threadIdx.x]; }
template <int kN>
void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  if (own_groups().empty()) own_groups().emplace_back();
  own_groups().back().push_back({d, kN, a, b, accumulate});
}
inline void finish_oldest() {
  for (const Product& p : own_groups().front()) compute(p);
  own_groups().erase(own_groups().begin());
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  for (const Product& p : own_groups().back())
    if (!p.accumulate) std::fill(p.d, p.d + p.n / 2, NAN);  // nobody may read this now
  own_groups().emplace_back();
  if (draw(2))
    while (own_groups().size() > 1) finish_oldest();
}
template <int kPending>
void wgmma_wait() {
  yield_until([] { return true; });  // others run, and may overwrite what has not been read
  while (own_groups().size() > 1 + kPending) finish_oldest();
}
template <int kSize>
void pin_registers(float (&)[kSize]) {}

// ---- matrix.cuh, input.cuh ----

inline uint32_t pack_bf16(float low, float high) {
  const auto round = [](float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
  };
  return round(low) | round(high) << 16;
}
template <bool kTransposed>
void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  static uint32_t addresses[kMaxCtas][kMaxThreads], values[kMaxCtas][kMaxThreads][4];
  const int cta = current_cta, first = threadIdx.x / 32 * 32;
  addresses[cta][threadIdx.x] = address;
  for (const auto& [i, x] : {std::pair{0, a}, {1, b}, {2, c}, {3, d}}) values[cta][threadIdx.x][i] = x;
  meet(warps[cta][first / 32], 32, [=] {
    for (int i = 0; i < 128; ++i) {  // matrix i / 32: row i % 32 / 4, columns 2 (i % 4) and the next
      const uint32_t row = addresses[cta][first + i / 32 * 8 + i % 32 / 4];
      memcpy(shared_memory + row + i % 4 * 4, &values[cta][first + i % 32][i / 32], 4);
    }
  });
}
inline float decode_e4m3(uint32_t codes, int i) { return decode(codes >> 8 * i & 255); }

// ---- A launch ----

static const std::function<void()>* kernel;
static void run_fiber() {
  (*kernel)();
  self().is_over = true;
  swapcontext(&self().context, &scheduler);
}
static void start(int cta, int thread) {
  constexpr size_t kStack = 1 << 16;
  Fiber& fiber = fibers[cta][thread];
  if (!fiber.stack) fiber.stack.reset(new char[kStack]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = kStack;
  makecontext(&fiber.context, run_fiber, 0);
  fiber.is_over = false, fiber.may_run = [] { return true; };
  groups[cta][thread].clear();
}
// Returns how many threads ran.
static int run_some(int first_block) {
  int num_ran = 0;
  for (int i = 0; i < num_ctas * num_threads; ++i) {
    const int cta = i / num_threads, thread = i % num_threads;
    if (thread % 32 == 0 && !draw(slowness[cta][thread / 32])) {
      i += 31;
      continue;
    }
    Fiber& fiber = fibers[cta][thread];
    if (fiber.is_over || !fiber.may_run()) continue;
    current_cta = cta, threadIdx = {thread}, blockIdx = {first_block + cta};
    swapcontext(&scheduler, &fiber.context);
    ++num_ran;
  }
  return num_ran;
}
// Returns what went wrong, or an empty string.
static const char* launch(const std::function<void()>& body, int grid, int block, int cluster, int seed) {
  static std::vector<uint8_t> memory(kMaxCtas * kCtaBytes + 1024);
  shared_memory = memory.data() + (1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024);
  kernel = &body, gridDim = {grid}, num_ctas = cluster, num_threads = block, fault.clear(), order.seed(seed);
  for (int first = 0; first < grid && fault.empty(); first += cluster) {
    std::fill(memory.begin(), memory.end(), 0xff);  // NaN
    for (auto& each : named) std::fill(std::begin(each), std::end(each), Meeting{});
    for (auto& each : warps) std::fill(std::begin(each), std::end(each), Meeting{});
    all_ctas = {}, tasks.clear();
    for (auto& each : slowness) {
      const int most = 1 << order() % 5;
      for (int& x : each) x = 1 + order() % most;
    }
    for (int i = 0; i < cluster * block; ++i) start(i / block, i % block);
    for (int idle = 0; fault.empty();) {
      int num_done = run_some(first);
      for (size_t i = 0; i < tasks.size();) {
        if (tasks[i].is_committed && draw(4)) run_task(i), ++num_done;
        else ++i;
      }
      int num_over = 0;
      for (int cta = 0; cta < cluster; ++cta) num_over += is_over(cta);
      if (num_over == cluster) break;
      idle = num_done ? 0 : idle + 1;
      if (idle > 1000) fail("all threads wait for ever");
    }
    if (!tasks.empty()) fail("a CTA has left before TMA was done with its memory");
  }
  return fault.c_str();
}

// Requests of many threads over one model, on the tiny golden checkpoint llava_gqa.
#include "runtime/service.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using namespace std::chrono_literals;
using test::golden_case;
using test::LoadedModel;
using testing::HasSubstr;

constexpr const char* kFolder = "llava_gqa";
constexpr std::array kSpecs = {"f16", "kivi,group=8,residual=8", "h2o,keep=0.5 + int4"};

/// Requests with and without images, of different lengths, greedy and sampled.
GenerationRequest request(size_t number) {
  constexpr std::array kCases = {"case0", "case1", "case2", "case4"};
  GenerationRequest made = golden_case(kFolder, kCases[number % kCases.size()]).request();
  made.id = fmt::format("request {}", number);
  made.max_tokens = 1 + static_cast<int>(number * 7 % 24);
  made.sampling.temperature = number % 3 == 0 ? 0.9 : 0;
  made.sampling.seed = number;
  return made;
}

class ServiceTest : public testing::Test {
 protected:
  static constexpr size_t kRequests = 60;

  /// What each request gives alone, before a service has the model to itself.
  static void SetUpTestSuite() {
    for (size_t i = 0; i < kRequests; ++i) alone(i);
  }
  static std::shared_ptr<const CachePlan> plan(size_t number) {
    static const auto plans = [] {
      std::vector<std::shared_ptr<const CachePlan>> made;
      for (const char* spec : kSpecs) {
        made.push_back(plan_cache(parse_spec(spec), model()->decoder().cache_shape()));
      }
      return made;
    }();
    return plans[number % plans.size()];
  }
  static const LoadedModel& model() {
    static const LoadedModel loaded(test::golden_root() / kFolder, {}, 2);
    return loaded;
  }

  static ServiceJob job(size_t number, const std::string& client = "a") {
    const int context = model()->decoder().max_positions();
    const PreparedRequest made = prepare_request(*model(), request(number), context, nullptr);
    ServiceJob job;
    job.client = client;
    job.plan = plan(number);
    job.size.prompt_rows = static_cast<int>(made.prompt.ids.size());
    job.size.visual_rows = static_cast<int>(made.prompt.visual_rows());
    job.size.max_rows = std::min(job.size.prompt_rows + made.request.max_tokens, made.context);
    job.prepare = [number, context](const Watch& watch) {
      return prepare_request(*model(), request(number), context, &watch);
    };
    return job;
  }
  static size_t bytes_of(const ServiceJob& job) { return reservation(*job.plan, job.size).bytes(); }
  static size_t most_bytes(size_t jobs) {
    size_t most = 0;
    for (size_t i = 0; i < jobs; ++i) most = std::max(most, bytes_of(job(i)));
    return most;
  }

  /// Tokens of a request that is alone.
  static const std::vector<int32_t>& alone(size_t number) {
    static std::map<size_t, std::vector<int32_t>> known;
    auto [place, is_new] = known.try_emplace(number);
    if (is_new) {
      const auto cache = make_cache(plan(number), size_t{8} << 20, model().stream().device());
      Generator generator(*model(), *cache, model().stream());
      const int key = generator.admit(request(number), {});
      while (!generator.finished(key)) {
        generator.step();
        generator.deliver();
      }
      place->second = generator.take(key).tokens;
    }
    return place->second;
  }

  static std::unique_ptr<Service> serve(Service::Settings settings = {}) {
    if (settings.cache_bytes == 0) settings.cache_bytes = size_t{16} << 20;
    return std::make_unique<Service>(*model(), model().stream(), settings);
  }
  static std::string text_of(Ticket& ticket) {
    std::string text;
    while (true) {
      const Ticket::News news = ticket.wait(10s);
      text += news.text;
      if (news.done) return text;
    }
  }
};

TEST_F(ServiceTest, AnswersDependOnNothingElse) {
  for (const int preparing : {0, 3}) {
    for (const size_t clients : {1u, 8u, 60u}) {
      Service::Settings settings;
      settings.preparing_threads = preparing;
      settings.most_running = clients;
      const auto service = serve(settings);
      std::vector<std::thread> threads;
      for (size_t client = 0; client < clients; ++client) {
        threads.emplace_back([&, client] {
          for (size_t i = client; i < kRequests; i += clients) {
            const auto ticket = service->submit(job(i, fmt::format("client {}", client)));
            const std::string text = text_of(*ticket);
            EXPECT_EQ(ticket->result().tokens, alone(i)) << i;
            EXPECT_EQ(ticket->result().text, text) << i;
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      service->drain(10s);
      const Service::Status status = service->status();
      EXPECT_EQ(status.running + status.waiting + status.reserved_bytes, 0u);
    }
  }
}

/// A long answer gets steps between the layers of each prompt that is read meanwhile, and neither
/// changes the other; with decode_share=0 prompts are read at once.
TEST_F(ServiceTest, AnswersGoOnWhileAPromptIsRead) {
  for (const double share : {0.0, 0.1}) {
    for (size_t policy = 0; policy < kSpecs.size(); ++policy) {
      std::atomic<int> steps = 0;
      Service::Settings settings;
      settings.decode_share = share;
      settings.on_step = [&](double) { ++steps; };
      const auto service = serve(settings);
      ServiceJob slow = job(0);
      slow.plan = plan(policy);
      slow.size.max_rows = slow.size.prompt_rows + 1500;
      slow.prepare = [](const Watch& watch) {
        GenerationRequest made = request(0);
        made.max_tokens = 1500;
        made.ignore_eos = true;
        return prepare_request(*model(), std::move(made), model()->decoder().max_positions(),
                               &watch);
      };
      const auto run = service->submit(slow);
      text_of(*run);
      const std::vector<int32_t> expected = run->result().tokens;
      const auto running = service->submit(std::move(slow));
      std::vector<std::shared_ptr<Ticket>> tickets;
      std::array<int, 11> before{}, after{};
      for (size_t i = 1; i < before.size(); ++i) {
        ServiceJob next = job(i);
        next.prepare = [&, i, prepare = next.prepare](const Watch& watch) {
          before[i] = steps;
          return prepare(watch);
        };
        next.on_prompt = [&, i](const Generator&, int) {
          after[i] = service->status().running < 2 ? before[i] : steps.load();
        };
        tickets.push_back(service->submit(std::move(next)));
      }
      int paused = 0;
      for (size_t i = 1; i < before.size(); ++i) {
        text_of(*tickets[i - 1]);
        EXPECT_EQ(tickets[i - 1]->result().tokens, alone(i)) << i;
        paused += after[i] > before[i] ? 1 : 0;
      }
      EXPECT_EQ(paused > 0, share > 0);
      text_of(*running);
      EXPECT_EQ(running->result().tokens, expected);
    }
  }
}

TEST_F(ServiceTest, AWarmUpLeavesNothing) {
  for (const int rows : {1, 64, 100000}) {
    Service::Settings settings;
    settings.most_running = 13;
    settings.warm_rows = rows;
    for (size_t i = 0; i < kSpecs.size(); ++i) settings.warm_policies.push_back(plan(i));
    const auto service = serve(settings);
    EXPECT_EQ(service->status().reserved_bytes, 0u);
    for (size_t i = 0; i < 6; ++i) {
      const auto ticket = service->submit(job(i));
      text_of(*ticket);
      EXPECT_EQ(ticket->result().tokens, alone(i)) << i;
    }
    service->drain(10s);
    EXPECT_EQ(service->status().reserved_bytes, 0u);
  }
}

/// With a cache one byte above what the largest request takes every request is answered, one by
/// one where need be; with one byte less the largest is refused at once.
TEST_F(ServiceTest, AdmissionIsExact) {
  const size_t most = most_bytes(kRequests);
  for (const size_t bytes : {most + 1, most - 64}) {
    Service::Settings settings;
    settings.cache_bytes = bytes;
    const auto service = serve(settings);
    std::vector<std::pair<size_t, std::shared_ptr<Ticket>>> tickets;
    size_t refused = 0;
    for (size_t i = 0; i < kRequests; ++i) {
      const ServiceJob next = job(i, fmt::format("client {}", i % 7));
      try {
        tickets.emplace_back(i, service->submit(next));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
        EXPECT_THAT(error.what(), HasSubstr("ask for fewer tokens"));
        EXPECT_GT(bytes_of(next), bytes);
        ++refused;
      }
    }
    EXPECT_EQ(refused > 0, bytes < most);
    for (const auto& [number, ticket] : tickets) {
      text_of(*ticket);
      EXPECT_EQ(ticket->result().tokens, alone(number)) << number;
    }
    service->drain(10s);
    EXPECT_LE(service->status().most_reserved_bytes, service->status().capacity_bytes);
    EXPECT_EQ(service->status().reserved_bytes, 0u);
  }
}

TEST_F(ServiceTest, ClientsTakeTurns) {
  Service::Settings settings;
  settings.most_running = 1;
  const auto service = serve(settings);
  std::mutex mutex;
  std::vector<std::string> order;
  std::promise<void> go;
  const std::shared_future<void> gate = go.get_future().share();
  std::vector<std::shared_ptr<Ticket>> tickets;
  const auto add = [&](const std::string& client) {
    ServiceJob next = job(0, client);
    next.prepare = [&, client, gate, prepare = next.prepare](const Watch& watch) {
      gate.wait();
      const std::scoped_lock lock(mutex);
      order.push_back(client);
      return prepare(watch);
    };
    tickets.push_back(service->submit(std::move(next)));
  };
  for (int i = 0; i < 20; ++i) add("a, of many");
  for (int i = 0; i < 2; ++i) add("b, of few");
  go.set_value();
  for (const auto& ticket : tickets) text_of(*ticket);
  const auto second = std::find(order.rbegin(), order.rend(), "b, of few").base() - order.begin();
  EXPECT_LE(second, 5) << testing::PrintToString(order);
}

/// Small requests pass one that does not fit, but not for ever.
TEST_F(ServiceTest, ALargeRequestGetsItsTurn) {
  // As large as many small ones, so that two of these run until it may.
  ServiceJob large = job(0, "large");
  large.size.max_rows = 2048;
  Service::Settings settings;
  settings.cache_bytes = bytes_of(large) + 1;
  settings.decode_share = 0;
  const auto service = serve(settings);
  std::atomic<int> before = 0;
  std::atomic<bool> started = false;
  std::promise<void> go;
  const std::shared_future<void> gate = go.get_future().share();
  std::vector<std::shared_ptr<Ticket>> tickets;
  const auto add = [&](ServiceJob next, bool is_large) {
    next.prepare = [&, is_large, gate, prepare = next.prepare](const Watch& watch) {
      gate.wait();
      if (is_large) started = true;
      if (!started) ++before;
      return prepare(watch);
    };
    tickets.push_back(service->submit(std::move(next)));
  };
  add(job(10, "small"), false);
  while (service->status().waiting > 0) std::this_thread::sleep_for(1ms);
  add(std::move(large), true);
  for (size_t i = 0; i < 60; ++i) add(job(3 * i, "small"), false);
  go.set_value();
  for (const auto& ticket : tickets) text_of(*ticket);
  EXPECT_GT(before, 1);
  EXPECT_LE(before, Service::kMostPasses + 2);
}

TEST_F(ServiceTest, CancelledRequestsFreeTheirPlaces) {
  Service::Settings settings;
  settings.most_running = 4;
  const auto service = serve(settings);
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::pair<size_t, std::shared_ptr<Ticket>>> tickets;
    for (size_t i = 0; i < 12; ++i) tickets.emplace_back(i, service->submit(job(i)));
    std::vector<bool> cancelled(tickets.size());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    for (size_t i = 0; i < tickets.size(); ++i) {
      if (random() % 3 != 0) continue;
      tickets[i].second->cancel();
      cancelled[i] = true;
    }
    for (const auto& [number, ticket] : tickets) {
      text_of(*ticket);
      const GenerationResult& result = ticket->result();
      if (cancelled[number] && result.finish_reason == "cancelled") continue;
      EXPECT_EQ(result.tokens, alone(number));
    }
  }
  service->drain(10s);
  EXPECT_EQ(service->status().reserved_bytes, 0u);
}

TEST_F(ServiceTest, AFailureIsItsRequestsOwn) {
  for (const int preparing : {0, 2}) {
    Service::Settings settings;
    settings.preparing_threads = preparing;
    const auto service = serve(settings);
    ServiceJob bad = job(2);
    bad.prepare = [](const Watch&) -> PreparedRequest {
      throw Error(ErrorCode::kCorruptFile, "picture 1 is damaged");
    };
    const auto first = service->submit(job(1));
    const auto failing = service->submit(std::move(bad));
    const auto last = service->submit(job(3));
    for (const auto& ticket : {first, failing, last}) text_of(*ticket);
    EXPECT_EQ(first->result().tokens, alone(1));
    EXPECT_EQ(last->result().tokens, alone(3));
    EXPECT_STREQ(test::error_of([&] { failing->result(); }).what(), "picture 1 is damaged");
  }
}

TEST_F(ServiceTest, RefusesWhatTheQueueDoesNotHold) {
  Service::Settings settings;
  settings.most_waiting = 3;
  settings.most_running = 1;
  const auto service = serve(settings);
  std::promise<void> go;
  ServiceJob slow = job(0);
  slow.prepare = [gate = go.get_future().share(), prepare = slow.prepare](const Watch& watch) {
    gate.wait();
    return prepare(watch);
  };
  std::vector<std::shared_ptr<Ticket>> tickets = {service->submit(std::move(slow))};
  while (service->status().waiting > 0) std::this_thread::sleep_for(1ms);
  for (size_t i = 0; i < 3; ++i) tickets.push_back(service->submit(job(i)));
  try {
    service->submit(job(3));
    FAIL();
  } catch (const ServiceRefusal& refusal) {
    EXPECT_EQ(refusal.reason(), ServiceRefusal::Reason::kFull);
    EXPECT_THAT(refusal.what(), HasSubstr("3 requests are waiting"));
  }
  go.set_value();
  for (const auto& ticket : tickets) text_of(*ticket);
}

TEST_F(ServiceTest, DrainsAndThenCancels) {
  for (const auto most : {10000ms, 0ms}) {
    const auto service = serve();
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (size_t i = 0; i < 20; ++i) tickets.push_back(service->submit(job(i)));
    std::thread draining([&] { service->drain(most); });
    while (!service->status().draining) std::this_thread::sleep_for(1ms);
    EXPECT_THROW(service->submit(job(1)), ServiceRefusal);
    draining.join();
    size_t cancelled = 0;
    for (size_t i = 0; i < tickets.size(); ++i) {
      text_of(*tickets[i]);
      cancelled += tickets[i]->result().finish_reason == "cancelled" ? 1 : 0;
      if (most > 0ms) {
        EXPECT_EQ(tickets[i]->result().tokens, alone(i));
      }
    }
    EXPECT_EQ(cancelled == 0, most > 0ms) << cancelled;
  }
}

TEST_F(ServiceTest, ATicketOutlivesItsService) {
  auto service = serve();
  const auto ticket = service->submit(job(5));
  service.reset();
  text_of(*ticket);
  ticket->cancel();
  EXPECT_THAT(ticket->result().finish_reason, testing::AnyOf("cancelled", "length", "stop"));
}

}  // namespace
}  // namespace kvlm

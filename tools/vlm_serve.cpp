#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <thread>

#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/serve/engines.h"
#include "tools/serve/options.h"
#include "tools/serve/server.h"

// vlm-serve: binds, loads, serves until a signal, and drains.
namespace kvlm {
namespace {

std::atomic<int> signals{0};
std::atomic<bool> was_interrupted{false};  // by Ctrl+C

/// From the moment there is something to drain.
void count_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) {
    if (signal == SIGINT) was_interrupted = true;
    ++signals;
  };
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

/// A server whose threads get no signal, which would end what they wait for.
std::unique_ptr<Server> make_server(const ServeOptions& options) {
  sigset_t handled, before;
  sigemptyset(&handled);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&handled, signal);
  pthread_sigmask(SIG_BLOCK, &handled, &before);
  auto server = std::make_unique<Server>(options);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return server;
}

int run(int argc, char** argv) {
  using namespace std::chrono_literals;
  ServeOptions options;
  if (const auto status = parse_serve_options(argc, argv, options)) return *status;
  catch_interrupts();
  std::optional<Engines> engines;  // outlive the server
  const std::unique_ptr<Server> made = make_server(options);
  Server& server = *made;
  {
    TerminalWatch watch(options.quiet);
    engines.emplace(options, watch);
    watch.clear();
  }
  print_warnings(engines->warnings());
  server.begin(*engines);
  count_signals();
  while (signals == 0 && !interrupted() && !server.failed()) std::this_thread::sleep_for(50ms);
  if (const auto [running, waiting] = server.left(); running + waiting > 0) {
    print_message(
        "vlm-serve: finishing {} running and {} waiting requests, for {} s at most; a second "
        "signal ends them\n",
        running, waiting, options.drain_s);
  }
  std::thread draining([&] { server.drain(std::chrono::seconds(options.drain_s)); });
  std::atomic<bool> ended = false;
  std::thread hurrying([&] {
    while (!ended) {
      if (signals > 1) server.hurry();
      std::this_thread::sleep_for(50ms);
    }
  });
  draining.join();
  ended = true;
  hurrying.join();
  if (server.failed()) return kExitFailed;
  return was_interrupted ? kExitInterrupted : 0;
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  return kvlm::run_program("vlm-serve", [&] { return kvlm::run(argc, argv); });
}

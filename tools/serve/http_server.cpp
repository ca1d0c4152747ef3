#include "tools/serve/http_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "tools/serve/api_error.h"

// cpp-httplib 0.11 parses and writes HTTP. What it does not bound is bounded here, in the stream
// that it reads from: its own limit of a body is of Content-Length alone, its time limit of a
// single read, and headers have none.
namespace kvlm {

namespace {

thread_local BoundedStream* current = nullptr;
/// Of the thread that turns away.
thread_local bool turns_away = false;

/// Milliseconds from now, at least 0.
int milliseconds_until(std::chrono::steady_clock::time_point end) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

std::string plain_reply(const ApiError& error, const char* reason) {
  const std::string body = error.json().dump();
  return fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}Connection: "
      "close\r\n\r\n{}",
      error.status(), reason, body.size(),
      error.retry_after() > 0 ? fmt::format("Retry-After: {}\r\n", error.retry_after()) : "", body);
}

std::string refusal_reply(int status, const HttpLimits& limits) {
  switch (status) {
    case 431:
      return plain_reply({431, "headers_too_large",
                          fmt::format("the headers have more than {}; send fewer",
                                      human_bytes(limits.header_bytes))},
                         "Request Header Fields Too Large");
    case 413:
      return plain_reply({413, "body_too_large",
                          fmt::format("the body has more than {}; send smaller images",
                                      human_bytes(limits.body_bytes))},
                         "Payload Too Large");
    case 429:
      return plain_reply({429, "queue_full", "too many large requests are here; try again later"},
                         "Too Many Requests");
    default:
      return plain_reply({408, "request_timeout", "the request came too slowly; send it again"},
                         "Request Timeout");
  }
}

/// Closes a connection so that a client that is still sending can read its answer, within `time`.
void close_gently(socket_t socket, std::chrono::milliseconds time) {
  shutdown(socket, SHUT_WR);
  constexpr size_t kMost = size_t{8} << 20;
  const auto end = std::chrono::steady_clock::now() + time;
  char scrap[16384];
  for (size_t taken = 0; taken < kMost;) {
    pollfd poll_one{socket, POLLIN, 0};
    if (poll(&poll_one, 1, milliseconds_until(end)) <= 0) break;
    const ssize_t count = recv(socket, scrap, sizeof(scrap), 0);
    if (count <= 0) break;
    taken += static_cast<size_t>(count);
  }
  close(socket);
}

/// A thread for each connection, up to a number of them, and one that turns the others away.
class Connections final : public httplib::TaskQueue {
 public:
  explicit Connections(size_t most) : most_(most) {
    threads_.emplace_back([this] {
      turns_away = true;
      run(surplus_);
    });
  }

  void enqueue(std::function<void()> task) override {
    const std::scoped_lock lock(mutex_);
    const bool more = taken_.idle <= taken_.tasks.size();  // than threads that wait
    const bool full = more && threads_.size() > most_;
    Queue& queue = full ? surplus_ : taken_;
    queue.tasks.push_back(std::move(task));
    if (more && !full) threads_.emplace_back([this] { run(taken_); });
    queue.ready.notify_one();
  }
  void shutdown() override {
    {
      const std::scoped_lock lock(mutex_);
      ended_ = true;
      taken_.ready.notify_all();
      surplus_.ready.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  struct Queue {
    std::condition_variable ready;
    std::deque<std::function<void()>> tasks;
    size_t idle = 0;  // threads
  };

  void run(Queue& queue) {
    std::unique_lock lock(mutex_);
    while (true) {
      ++queue.idle;
      queue.ready.wait(lock, [&] { return ended_ || !queue.tasks.empty(); });
      --queue.idle;
      if (queue.tasks.empty()) return;
      const std::function<void()> task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  size_t most_;
  std::mutex mutex_;
  Queue taken_, surplus_;
  std::list<std::thread> threads_;
  bool ended_ = false;
};

}  // namespace

BoundedStream::BoundedStream(socket_t socket, const HttpLimits& limits, Shared& shared)
    : socket_(socket), limits_(limits), shared_(shared) {}

/// Whether something came in time.
bool BoundedStream::wait_to_read(Clock::time_point end) const {
  constexpr int kLookMs = 100;  // whether the server ends meanwhile
  while (in_body_ || !shared_.ending) {
    const int left = milliseconds_until(end);
    pollfd poll_one{socket_, POLLIN, 0};
    if (poll(&poll_one, 1, std::min(left, kLookMs)) > 0) return true;
    if (left == 0) break;
  }
  return false;
}

/// Waits for more from the client; false if there is none, or no more is read.
bool BoundedStream::fill() {
  using std::chrono::seconds;
  const Clock::time_point end =
      in_body_ ? body_start_ + limits_.body_time + seconds(received_ / limits_.body_rate)
               : start_ + limits_.header_time;
  const size_t most = in_body_ ? limits_.body_bytes : limits_.header_bytes;
  // Lines of chunks among it.
  if (received_ > most + (in_body_ ? most / 16 + 1024 : 0)) {
    refusal_ = in_body_ ? 413 : 431;
    return false;
  }
  if (!wait_to_read(end)) {
    refusal_ = 408;
    return false;
  }
  buffer_.resize(16384);
  at_ = 0;
  const ssize_t count = recv(socket_, buffer_.data(), buffer_.size(), 0);
  buffer_.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  if (in_body_) {
    received_ += buffer_.size();
    held_ += buffer_.size();
    if ((shared_.bodies += buffer_.size()) > limits_.all_bodies) {
      refusal_ = 429;
      return false;
    }
  }
  return count > 0;
}

ssize_t BoundedStream::read(char* to, size_t size) {
  if (refusal_ != 0) return -1;
  if (at_ == buffer_.size() && !fill()) return refusal_ != 0 ? -1 : 0;
  const size_t count = std::min(size, buffer_.size() - at_);
  std::memcpy(to, buffer_.data() + at_, count);
  at_ += count;
  if (in_body_) return static_cast<ssize_t>(count);
  for (size_t i = 0; i < count && !in_body_; ++i) {
    ++received_;
    if (to[i] == '\n') {
      in_body_ = ++line_ends_ == 2;
    } else if (to[i] != '\r') {
      line_ends_ = 0;
    }
  }
  if (!in_body_ && received_ > limits_.header_bytes) {
    refusal_ = 431;
    return -1;
  }
  if (in_body_) {
    body_start_ = Clock::now();
    received_ = buffer_.size() - at_;
  }
  return static_cast<ssize_t>(count);
}

bool BoundedStream::send_all(const char* from, size_t size) {
  while (size > 0) {
    pollfd poll_one{socket_, POLLOUT, 0};
    if (poll(&poll_one, 1, static_cast<int>(limits_.write_time.count())) <= 0) return false;
    const ssize_t count = send(socket_, from, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count <= 0) return false;
    from += count;
    size -= static_cast<size_t>(count);
    written_ += static_cast<size_t>(count);
  }
  return true;
}

ssize_t BoundedStream::write(const char* from, size_t size) {
  if (refusal_ != 0) return static_cast<ssize_t>(size);  // httplib's own idea of an answer
  return send_all(from, size) ? static_cast<ssize_t>(size) : -1;
}

void BoundedStream::reply(const std::string& text) { send_all(text.data(), text.size()); }

bool BoundedStream::has_gone() const {
  pollfd poll_one{socket_, POLLRDHUP, 0};
  return poll(&poll_one, 1, 0) > 0 && (poll_one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

namespace {

void address_of(int (*get)(int, sockaddr*, socklen_t*), socket_t socket, std::string& ip,
                int& port) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char text[INET6_ADDRSTRLEN] = "";
  if (get(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return;
  if (address.ss_family == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(&address);
    inet_ntop(AF_INET, &four->sin_addr, text, sizeof(text));
    port = ntohs(four->sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto* six = reinterpret_cast<const sockaddr_in6*>(&address);
    inet_ntop(AF_INET6, &six->sin6_addr, text, sizeof(text));
    port = ntohs(six->sin6_port);
  }
  ip = text;
}

}  // namespace

void BoundedStream::get_remote_ip_and_port(std::string& ip, int& port) const {
  address_of(&getpeername, socket_, ip, port);
}

void BoundedStream::get_local_ip_and_port(std::string& ip, int& port) const {
  address_of(&getsockname, socket_, ip, port);
}

HttpServer::HttpServer(const HttpLimits& limits) : limits_(limits) {
  new_task_queue = [most = limits.connections] { return new Connections(most); };
  // Not SO_REUSEPORT, httplib's default: two servers would share a port, each with half of the
  // requests.
  set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  set_payload_max_length(limits.body_bytes);
  set_tcp_nodelay(true);
}

BoundedStream& HttpServer::stream() noexcept { return *current; }

int HttpServer::bind(const std::string& host, int port) {
  const int bound = port == 0 ? bind_to_any_port(host) : bind_to_port(host, port) ? port : -1;
  if (bound > 0) {
    // httplib asks for 5 connections that wait to be accepted; more are reset in a rush.
    ::listen(svr_sock_, SOMAXCONN);
    return bound;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}:{} cannot be listened on: {}; give another --host or --port",
                          printable(host), port, std::strerror(errno)));
}

void HttpServer::end() {
  shared_.ending = true;
  stop();
}

bool HttpServer::process_and_close_socket(socket_t socket) {
  BoundedStream stream(socket, limits_, shared_);
  if (turns_away) {
    stream.reply(plain_reply(
        {503, "too_many_connections",
         fmt::format("{} connections are open already; try again later", limits_.connections)},
        "Service Unavailable"));
    close_gently(socket, std::chrono::milliseconds(20));
    return false;
  }
  current = &stream;
  bool closed = false;
  const bool answered = process_request(stream, /*close_connection=*/true, closed, nullptr);
  if (stream.refusal() != 0 && stream.written() == 0) {
    stream.reply(refusal_reply(stream.refusal(), limits_));
  }
  current = nullptr;
  close_gently(socket, std::chrono::seconds(1));
  return answered;
}

}  // namespace kvlm

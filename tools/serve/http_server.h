#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

namespace kvlm {

/// What one connection may send, and how fast.
struct HttpLimits {
  size_t header_bytes = size_t{32} << 10;
  size_t body_bytes = size_t{64} << 20;
  std::chrono::milliseconds header_time{10'000};
  std::chrono::milliseconds body_time{10'000};  ///< and a second more for every body_rate bytes
  size_t body_rate = size_t{64} << 10;
  std::chrono::milliseconds write_time{30'000};  ///< in which a reader takes something
  size_t connections = 256;
  size_t all_bodies = size_t{1} << 30;  ///< bytes of the bodies of all connections
};

/// A socket that reads no more than its limits, and knows whether its client is still there.
class BoundedStream final : public httplib::Stream {
 public:
  /// What the streams of a server have in common.
  struct Shared {
    std::atomic<size_t> bodies = 0;    ///< bytes of all bodies that are held
    std::atomic<bool> ending = false;  ///< connections without a request are closed
  };

  BoundedStream(socket_t socket, const HttpLimits& limits, Shared& shared);
  ~BoundedStream() override { shared_.bodies -= held_; }
  BoundedStream(const BoundedStream&) = delete;
  BoundedStream& operator=(const BoundedStream&) = delete;

  bool is_readable() const override { return true; }
  bool is_writable() const override { return !has_gone(); }
  ssize_t read(char* to, size_t size) override;
  ssize_t write(const char* from, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  socket_t socket() const override { return socket_; }

  /// Whether the client has closed its end, or cannot be reached.
  bool has_gone() const;
  /// Why nothing more is read: 408, 413, 429 or 431; 0 if it is.
  int refusal() const noexcept { return refusal_; }
  size_t written() const noexcept { return written_; }
  /// Writes all of it, whatever was refused.
  void reply(const std::string& text);

 private:
  using Clock = std::chrono::steady_clock;
  bool fill();
  bool wait_to_read(Clock::time_point end) const;
  bool send_all(const char* from, size_t size);

  socket_t socket_;
  const HttpLimits& limits_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point body_start_;
  std::string buffer_;
  size_t at_ = 0;  // of what of buffer_ was read
  bool in_body_ = false;
  int line_ends_ = 0;    // consecutive, at the end of what was read of the headers
  size_t received_ = 0;  // of the headers, then of the body
  size_t written_ = 0;
  int refusal_ = 0;
  Shared& shared_;
  size_t held_ = 0;  // of it
};

/// httplib's server within limits: one request a connection, headers and bodies bounded in bytes
/// and time however they are sent, clients that go away noticed, its address to itself.
class HttpServer : public httplib::Server {
 public:
  explicit HttpServer(const HttpLimits& limits);

  /// The stream of the request that this thread is answering.
  static BoundedStream& stream() noexcept;
  /// Binds and returns the port, which `port` 0 leaves to the system. Throws
  /// Error{kInvalidArgument} if somebody else has it.
  int bind(const std::string& host, int port);
  /// Stops listening, and closes connections that have not sent a request.
  void end();

 private:
  bool process_and_close_socket(socket_t socket) override;

  HttpLimits limits_;
  BoundedStream::Shared shared_;
};

}  // namespace kvlm

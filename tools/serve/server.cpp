#include "tools/serve/server.h"

#include <arpa/inet.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <ranges>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "kvcache/spec/words.h"
#include "runtime/policy_profile.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/kv/estimate_json.h"
#include "tools/serve/api_error.h"
#include "tools/serve/exchange.h"
#include "tools/serve/page.h"

// The life of the server and the way of a request: checked by its headers, read within limits, and
// answered, a chat request by chat.cpp.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr const char* kJson = "application/json";
/// (path, method)
constexpr auto kPaths =
    std::to_array<std::pair<std::string_view, std::string_view>>({{"/", "GET"},
                                                                  {"/v1/chat/completions", "POST"},
                                                                  {"/v1/models", "GET"},
                                                                  {"/v1/models/MODEL", "GET"},
                                                                  {"/v1/kv/explain", "POST"},
                                                                  {"/health", "GET"},
                                                                  {"/metrics", "GET"}});

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// A Host header without its port.
std::string without_port(std::string host) {
  if (const auto colon = host.rfind(':');
      colon != std::string::npos && host.find(']', colon) == std::string::npos) {
    host.resize(colon);
  }
  return host;
}

/// A Host header that is an IP address, and no name.
bool is_address(const std::string& header) {
  std::string host = without_port(header);
  std::array<std::byte, sizeof(in6_addr)> bytes{};
  if (host.starts_with('[') && host.ends_with(']')) {
    return inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), bytes.data()) == 1;
  }
  return inet_pton(AF_INET, host.c_str(), bytes.data()) == 1;
}

bool is_loopback_name(const std::string& header) {
  const std::string host = without_port(header);
  const bool is_number = host.find_first_not_of("0123456789.") == std::string::npos;
  return host.empty() || host == "localhost" || host == "[::1]" ||
         (is_number && host.starts_with("127."));
}

}  // namespace

Server::Server(const ServeOptions& options)
    : options_(options),
      http_({.body_bytes = options.max_body,
             .connections = static_cast<size_t>(options.connections)}),
      media_(options.media_root),
      limits_({.images = static_cast<size_t>(options.max_images)}),
      started_(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())) {
  route();
  port_ = http_.bind(options.host, options.port);
  listening_ = std::thread([this] { http_.listen_after_bind(); });
}

Server::~Server() {
  if (ready_) drain(0s);
  while (!http_.is_running() && listening_.joinable() && !draining_) std::this_thread::yield();
  http_.end();
  listening_.join();
}

void Server::begin(Engines& engines) {
  engines_ = &engines;
  {
    const std::scoped_lock lock(plans_mutex_);
    plans_[engines.plan()->spec] = engines.plan();
  }
  for (const auto& [name, spec] : options_.aliases) plan_of(spec);
  std::vector<std::shared_ptr<const CachePlan>> plans;
  for (const auto& [spec, plan] : plans_) plans.push_back(plan);
  engines.begin(
      plans, [this](double seconds) { metrics_.step(seconds); },
      [this](double seconds) { metrics_.stall(seconds); });
  ready_ = true;
  print_message("http://{}:{}/v1  {}, {}, {} cache, {} at once{}\n", options_.host, port_,
                options_.name, engines.plan()->spec, human_bytes(engines.cache_bytes()),
                options_.most_running,
                options_.devices.size() == 1 ? "" : " on each of " + engines.devices());
}

void Server::drain(std::chrono::seconds most) {
  draining_ = true;
  if (ready_) engines_->drain(most);
}

void Server::hurry() noexcept {
  if (ready_) engines_->hurry();
}

std::pair<size_t, size_t> Server::left() const {
  if (!ready_) return {0, 0};
  const Service::Status status = engines_->status();
  return {status.running, status.waiting};
}

bool Server::failed() const { return ready_ && engines_->status().failed; }

Engines& Server::engines() {
  if (!ready_) throw ApiError(503, "loading", "the model is being loaded; try again soon");
  return *engines_;
}

void Server::route() {
  using httplib::Request;
  using httplib::Response;
  using Handled = httplib::Server::HandlerResponse;
  // Before the body is read.
  http_.set_pre_routing_handler([this](const Request& request, Response& response) {
    bool fine = true;
    guard(request, response, [&](Exchange& exchange) {
      fine = false;
      check_head(request);
      fine = exchange.logged = true;
    });
    return fine ? Handled::Unhandled : Handled::Handled;
  });
  http_.Post("/v1/chat/completions", [this](const Request& request, Response& response) {
    guard(request, response, [this](Exchange& exchange) { chat(exchange); });
  });
  http_.Post("/v1/kv/explain", [this](const Request& request, Response& response) {
    guard(request, response, [&](Exchange& exchange) {
      response.set_content(line_of(explain(request.body)), kJson);
      exchange.logged = true;
    });
  });
  http_.Get("/", [](const Request&, Response& response) {
    response.set_header(
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'");
    response.set_header("X-Content-Type-Options", "nosniff");
    response.set_content(kPage, "text/html; charset=utf-8");
  });
  const auto get = [this](const char* path, auto text_of, const char* type) {
    http_.Get(path, [this, text_of, type](const Request& request, Response& response) {
      guard(request, response, [&](Exchange& exchange) {
        response.set_content(text_of(request, response), type);
        exchange.logged = true;
      });
    });
  };
  get(
      "/health",
      [this](const Request&, Response& response) {
        const Json json = health();
        response.status = json["status"] == "ok" ? 200 : 503;
        return line_of(json);
      },
      kJson);
  get(
      "/metrics",
      [this](const Request&, Response&) {
        return metrics_.text(ready_ ? engines_->status() : Service::Status{});
      },
      "text/plain; version=0.0.4");
  get(
      "/v1/models", [this](const Request&, Response&) { return line_of(models()); }, kJson);
  get(R"(/v1/models/([^/]+))",
      [this](const Request& request, Response&) {
        const std::string id = request.matches[1];
        const Json list = models();
        for (const Json& model : list["data"]) {
          if (model["id"] == id) return line_of(model);
        }
        throw ApiError(
            404, "model_not_found",
            fmt::format("there is no model {}; GET /v1/models lists them", printable(id)), "model");
      },
      kJson);
  http_.set_error_handler([](const Request& request, Response& response) {
    if (!response.body.empty() || response.status == 200) return;
    const auto known =
        std::ranges::find(kPaths, request.path, [](const auto& path) { return path.first; });
    ApiError error(response.status, "invalid_json", "the request is no HTTP that is understood");
    if (response.status == 404 && known != kPaths.end()) {
      error = ApiError(405, "wrong_method",
                       fmt::format("{} does not take {}; send it by {}", printable(request.path),
                                   printable(request.method), known->second));
      response.set_header("Allow", std::string(known->second));
    } else if (response.status == 404) {
      error = ApiError(404, "unknown_url",
                       fmt::format("there is no {}; there are {}", printable(request.path),
                                   fmt::join(kPaths | std::views::keys, ", ")));
    } else if (response.status == 413) {
      error = ApiError(413, "body_too_large", "the body is too large; send smaller images");
    } else if (response.status >= 500) {
      error = ApiError(500, "internal", "unexpected failure; please report it");
    }
    response.status = error.status();
    response.set_content(line_of(error.json()), kJson);
  });
}

/// The request comes from the page at /. A name that is not the machine's own may have been made to
/// lead here by another page (DNS rebinding), so without keys it has to be an address.
bool Server::is_own_page(const httplib::Request& request) const {
  const std::string host = request.get_header_value("Host");
  const std::string origin = request.get_header_value("Origin");
  if (!options_.keys.empty() && origin == "https://" + host) return true;  // through a proxy
  return origin == "http://" + host &&
         (is_loopback_name(host) || is_address(host) || !options_.keys.empty());
}

/// What is refused whatever the body holds.
void Server::check_head(const httplib::Request& request) const {
  const bool loopback =
      options_.host == "localhost" || options_.host == "::1" || options_.host.starts_with("127.");
  if (loopback && !is_loopback_name(request.get_header_value("Host"))) {
    throw ApiError(403, "wrong_host",
                   "the Host header names another machine; ask http://127.0.0.1 or localhost");
  }
  if (request.has_header("Origin") && !is_own_page(request)) {
    throw ApiError(403, "wrong_origin",
                   "pages of other servers are not answered; open this one's by the machine's "
                   "address, or serve with keys");
  }
  constexpr std::array<std::string_view, 3> kOpen = {"/", "/health", "/metrics"};
  if (std::ranges::find(kOpen, request.path) == kOpen.end()) client_of(request);
  const size_t lengths = request.get_header_value_count("Content-Length");
  const bool chunked = request.has_header("Transfer-Encoding");
  if (lengths > 1 || (lengths == 1 && chunked)) {
    throw ApiError(400, "invalid_json", "the body has two lengths; send one Content-Length");
  }
  if (lengths == 1) {
    const std::string length = request.get_header_value("Content-Length");
    if (length.empty() || length.find_first_not_of("0123456789") != std::string::npos ||
        length.size() > 18) {
      throw ApiError(400, "invalid_json",
                     fmt::format("Content-Length is {}; expected a number", printable(length)));
    }
    if (std::stoull(length) > options_.max_body) {
      throw ApiError(413, "body_too_large",
                     fmt::format("the body has {} bytes; at most {} are read, send smaller images",
                                 length, options_.max_body));
    }
  }
  if (request.method != "POST") return;
  if (request.has_header("Content-Encoding") &&
      request.get_header_value("Content-Encoding") != "identity") {
    throw ApiError(415, "content_encoding", "compressed bodies are not read; send plain JSON");
  }
  std::string type = request.get_header_value("Content-Type");
  type = type.substr(0, type.find(';'));
  if (type != kJson) {
    throw ApiError(415, "wrong_content_type",
                   fmt::format("Content-Type is {}; send {}",
                               type.empty() ? "missing" : printable(type), kJson));
  }
}

/// Whose request it is: the name of its key, else its address. Throws ApiError without a key.
std::string Server::client_of(const httplib::Request& request) const {
  if (options_.keys.empty()) return request.remote_addr;
  constexpr std::string_view kBearer = "Bearer ";
  const std::string header = request.get_header_value("Authorization");
  if (header.starts_with(kBearer)) {
    const std::string given = header.substr(kBearer.size());
    for (const auto& [key, name] : options_.keys) {
      if (key.size() == given.size() && CRYPTO_memcmp(key.data(), given.data(), key.size()) == 0) {
        return name;
      }
    }
  }
  throw ApiError(401, "invalid_api_key",
                 "no such API key; send one as \"Authorization: Bearer KEY\"");
}

/// Runs what answers a request, and turns what it throws into an answer.
void Server::guard(const httplib::Request& request, httplib::Response& response,
                   const std::function<void(Exchange&)>& answer) {
  const Clock::time_point start = Clock::now();
  Exchange exchange{request, response};
  try {
    answer(exchange);
    if (exchange.logged) return;
  } catch (...) {
    const ApiError error = api_error_of(std::current_exception());
    response.status = error.status();
    if (error.retry_after() > 0) {
      response.set_header("Retry-After", std::to_string(error.retry_after()));
    }
    if (error.status() == 401) response.set_header("WWW-Authenticate", "Bearer");
    response.set_content(line_of(error.json()), kJson);
    metrics_.request(error.status(), exchange.model, milliseconds_since(start) / 1000);
    log({{"client", request.remote_addr}, {"status", error.status()}, {"error", error.what()}});
  }
}

Json Server::models() const {
  const int length = ready_ ? engines_->model().decoder().max_positions() : 0;
  Json list = Json::array();
  const auto add = [&](const std::string& id, const std::string& spec) {
    list.push_back({{"id", id},
                    {"object", "model"},
                    {"created", started_},
                    {"owned_by", "kvlm"},
                    {"root", options_.name},
                    {"kv", spec},
                    {"max_model_len", length}});
  };
  add(options_.name, ready_ ? engines_->plan()->spec : "");
  for (const auto& [name, spec] : options_.aliases) add(name, spec);
  return {{"object", "list"}, {"data", std::move(list)}};
}

Json Server::health() const {
  Json json{{"status", "loading"}, {"model", options_.name}};
  if (!ready_) return json;
  const Service::Status status = engines_->status();
  json["status"] = status.failed ? "failed" : draining_ ? "draining" : "ok";
  json["device"] = engines_->devices();
  json["running"] = status.running;
  json["waiting"] = status.waiting;
  return json;
}

std::string Server::spec_of(const std::string& model, const std::optional<std::string>& kv) const {
  const auto alias = options_.aliases.find(model);
  const bool served = model.empty() || model == options_.name || alias != options_.aliases.end();
  if (!served) {
    std::vector<std::string_view> names = {options_.name};
    for (const auto& [name, spec] : options_.aliases) names.push_back(name);
    const std::string_view near = nearest_spelling(model, names);
    throw ApiError(404, "model_not_found",
                   fmt::format("there is no model {}{}; the models are {}", printable(model),
                               near.empty() ? "" : fmt::format(" (did you mean {}?)", near),
                               fmt::join(names, ", ")),
                   "model");
  }
  if (kv) {
    if (!options_.any_kv) {
      throw ApiError(400, "invalid_kv",
                     "this server takes the cache policies of its models alone; leave out kv",
                     "kv");
    }
    if (kv->find('@') != std::string::npos) {
      throw ApiError(400, "invalid_kv", "kv names a file of the server; write the policy itself",
                     "kv");
    }
    return *kv;
  }
  return alias != options_.aliases.end() ? alias->second : engines_->plan()->spec;
}

std::shared_ptr<const CachePlan> Server::plan_of(const std::string& text) {
  try {
    const CacheSpec spec = parse_spec(text);
    const std::string name = canonical(spec);
    const std::scoped_lock lock(plans_mutex_);
    if (const auto found = plans_.find(name); found != plans_.end()) return found->second;
    constexpr size_t kMostPlans = 256;
    if (plans_.size() >= kMostPlans) plans_.clear();
    PolicyProfile profile;
    if (!options_.session.kv_profile.empty()) profile = read_profile(options_.session.kv_profile);
    return plans_[name] = plan_cache(spec, engines_->model().decoder().cache_shape(), &profile);
  } catch (const Error& error) {
    throw ApiError(400, "invalid_kv", error.what(), "kv");
  }
}

/// What a request would take of the cache, or a prompt of so many tokens: nothing is decoded or
/// answered.
nlohmann::ordered_json Server::explain(const std::string& text) {
  static_cast<void>(engines());  // there is a model
  const nlohmann::json body = parse_body(text);
  std::shared_ptr<const CachePlan> plan;
  SequenceSize size;
  if (body.is_object() && body.contains("messages") && !body.contains("tokens")) {
    const std::shared_ptr<Asked> asked = understand(body);
    plan = asked->plan;
    size = asked->size;
  } else {
    const PromptRequest request = parse_prompt_request(body);
    plan = plan_of(spec_of(request.model, request.kv));
    size = {request.tokens, request.visual, request.tokens + request.max_tokens};
  }
  const PromptSize prompt{size.prompt_rows, size.visual_rows};
  PolicyProfile profile;
  if (!options_.session.kv_profile.empty()) profile = read_profile(options_.session.kv_profile);
  Json json = estimate_json(plan->spec, options_.name, plan->shape, prompt,
                            estimate(parse_spec(plan->spec), plan->shape, prompt, &profile));
  const Reservation needed = reservation(*plan, size);
  const size_t capacity = engines_->cache_bytes();
  const size_t left = capacity - std::min(capacity, needed.staging);
  json["max_tokens"] = size.max_rows - size.prompt_rows;
  json["reserved_bytes"] = needed.bytes();
  json["staging_bytes"] = needed.staging;
  json["at_once"] = left / std::max<size_t>(needed.kept, 1);
  return json;
}

void Server::log(const Json& line) const {
  if (options_.quiet) return;
  const auto now =
      std::chrono::time_point_cast<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const std::string time =
      fmt::format("{:%Y-%m-%dT%H:%M:%S}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(now)));
  if (options_.log_json) {
    Json timed{{"time", time}};
    timed.update(line);
    print_message("{}\n", line_of(timed));
    return;
  }
  std::string text = time;
  for (const auto& [key, value] : line.items()) {
    text += value.is_number_float() ? fmt::format(" {}={:.1f}", key, value.get<double>())
            : value.is_string()     ? fmt::format(" {}={}", key, value.get<std::string>())
                                    : fmt::format(" {}={}", key, value.dump());
  }
  print_message("{}\n", text);
}

}  // namespace kvlm

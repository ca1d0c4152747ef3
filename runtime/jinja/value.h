#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace kvlm::jinja {

class Value;
struct List;
struct Dict;
struct Namespace;
struct Loop;
struct Macro;
struct Statement;

/// A name or attribute that does not exist; prints as nothing, is false, and may be tested.
struct Undefined {
  std::string name;
};

/// What a template computes with: Python's values, as far as chat templates need them. Cheap to
/// copy; everything but a namespace is immutable.
class Value {
 public:
  using Text = std::shared_ptr<const std::string>;

  Value() : data_(nullptr) {}  // None
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string value) : data_(std::make_shared<const std::string>(std::move(value))) {}
  Value(const char* value) : Value(std::string(value)) {}
  Value(Undefined value) : data_(std::make_shared<const Undefined>(std::move(value))) {}
  Value(std::shared_ptr<const List> value) : data_(std::move(value)) {}
  Value(std::shared_ptr<const Dict> value) : data_(std::move(value)) {}
  Value(std::shared_ptr<Namespace> value) : data_(std::move(value)) {}
  Value(std::shared_ptr<const Loop> value) : data_(std::move(value)) {}
  Value(std::shared_ptr<const Macro> value) : data_(std::move(value)) {}

  bool is_none() const { return std::holds_alternative<std::nullptr_t>(data_); }
  bool is_undefined() const { return get<std::shared_ptr<const Undefined>>() != nullptr; }
  const bool* boolean() const { return get<bool>(); }
  const int64_t* integer() const { return get<int64_t>(); }
  const double* real() const { return get<double>(); }
  /// bool, int or float.
  bool is_number() const { return boolean() || integer() || real(); }
  /// As Python's int(): true is 1. Only for boolean() and integer().
  int64_t as_integer() const { return boolean() ? (*boolean() ? 1 : 0) : *integer(); }
  /// Only for numbers.
  double as_real() const { return real() ? *real() : static_cast<double>(as_integer()); }
  const std::string* text() const { return pointee<Text>(); }
  const List* list() const { return pointee<std::shared_ptr<const List>>(); }
  const Dict* dict() const { return pointee<std::shared_ptr<const Dict>>(); }
  Namespace* name_space() const { return pointee<std::shared_ptr<Namespace>>(); }
  const Loop* loop() const { return pointee<std::shared_ptr<const Loop>>(); }
  const Macro* macro() const { return pointee<std::shared_ptr<const Macro>>(); }
  const Undefined* undefined() const { return pointee<std::shared_ptr<const Undefined>>(); }
  std::shared_ptr<const List> shared_list() const {
    const auto* list = get<std::shared_ptr<const List>>();
    return list ? *list : nullptr;
  }

  /// Python's bool().
  bool truthy() const;
  /// Python's name for the type: "str", "list", ...
  std::string_view type_name() const;
  /// Containers inside each other; 0 for a scalar.
  int depth() const;

 private:
  template <class T>
  const T* get() const {
    return std::get_if<T>(&data_);
  }
  template <class T>
  auto pointee() const -> decltype(std::declval<T>().get()) {
    const T* pointer = get<T>();
    return pointer ? pointer->get() : nullptr;
  }

  std::variant<std::nullptr_t, bool, int64_t, double, Text, std::shared_ptr<const Undefined>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
               std::shared_ptr<const Loop>, std::shared_ptr<const Macro>>
      data_;
};

/// A list or a tuple.
struct List {
  std::vector<Value> items;
  bool tuple = false;
  int depth = 1;
  std::string range;  ///< how Python prints it, of what range() gives; else empty
};

/// In order of insertion.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  int depth = 1;

  const Value* find(std::string_view key) const;
};

/// namespace(): the one thing that can change. It is never inside another value, so that no value
/// can contain itself.
struct Namespace {
  std::map<std::string, Value, std::less<>> items;

  const Value* find(std::string_view key) const;
  void set(std::string_view key, Value value);
};

/// `loop` in a for block.
struct Loop {
  std::shared_ptr<const List> items;
  size_t index = 0;

  /// loop.NAME, or Undefined.
  Value attribute(std::string_view name) const;
};

using Scope = std::unordered_map<std::string, Value>;

/// What {% macro %} defines. It runs in the scopes of its definition, not in those of its caller.
/// Like a namespace, it is never inside another value.
struct Macro {
  const Statement* definition = nullptr;
  std::vector<std::shared_ptr<Scope>> scopes;  ///< outermost first
};

/// No value nests deeper; it is what keeps recursion over values off the end of the stack.
constexpr int kMaxValueDepth = 64;

/// Throw Error{kUnsupported} beyond kMaxValueDepth and for a namespace or a macro inside.
Value make_list(std::vector<Value> items, bool tuple = false);
Value make_dict(std::vector<std::pair<Value, Value>> items);

}  // namespace kvlm::jinja

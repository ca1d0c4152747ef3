#include "runtime/jinja/evaluator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/find_text.h"
#include "llm/unicode.h"
#include "runtime/jinja/lexer.h"
#include "runtime/jinja/text.h"

// Runs a parsed chat template: a walk over its tree with a scope of variables a block. Rendering
// costs a bounded number of steps and bytes, because templates come with a checkpoint and
// checkpoints are not trusted. Functions, methods, filters and tests are those that published
// templates use; the tables below name them, and the parser refuses others by name.
namespace kvlm::jinja {

namespace {

using Kind = Expr::Kind;

/// What one rendering may take; a long chat stays under a hundredth of it. A step is a node
/// evaluated, an item looked at or 16 bytes made.
constexpr int64_t kMaxSteps = 4'000'000;
constexpr size_t kMaxOutputBytes = size_t{64} << 20;

constexpr auto kFunctions =
    std::to_array<std::string_view>({"namespace", "range", "raise_exception"});

/// Nodes inside each other while they run: a macro that calls itself ends here, not with the stack.
constexpr int kMaxDepth = 512;

/// Names that the reference defines as functions, whether or not they are built here.
constexpr auto kGlobals =
    std::to_array<std::string_view>({"namespace", "range", "raise_exception", "strftime_now",
                                     "dict", "lipsum", "cycler", "joiner", "self"});

constexpr auto kMethods = std::to_array<std::string_view>(
    {"upper", "lower", "strip", "lstrip", "rstrip", "split", "startswith", "endswith", "title",
     "replace", "items", "keys", "values", "capitalize", "get", "find"});

constexpr auto kFilters = std::to_array<std::string_view>(
    {"selectattr", "rejectattr", "select", "reject", "map",     "trim",    "length", "count",
     "join",       "tojson",     "upper",  "lower",  "list",    "first",   "last",   "default",
     "d",          "string",     "int",    "float",  "replace", "reverse", "items",  "title",
     "capitalize", "safe",       "attr",   "unique", "abs"});

constexpr auto kTests = std::to_array<std::string_view>(
    {"defined", "undefined",   "none",    "string",  "mapping",     "iterable", "sequence",
     "number",  "integer",     "float",   "boolean", "true",        "false",    "odd",
     "even",    "divisibleby", "equalto", "eq",      "==",          "ne",       "!=",
     "lt",      "lessthan",    "<",       "gt",      "greaterthan", ">",        "le",
     "<=",      "ge",          ">=",      "in",      "lower",       "upper"});

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

/// How a block was left.
enum class Flow : uint8_t { kNext, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(std::vector<std::pair<std::string, Value>>&& variables, const std::string& name)
      : name_(name) {
    open_scope();
    for (auto& [key, value] : variables) scopes_.back()->insert_or_assign(key, std::move(value));
  }

  /// A scope may hold a macro that holds the scope.
  ~Evaluator() {
    for (const auto& macro : macros_) macro->scopes.clear();
  }
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  std::string run(const Block& block) {
    std::string out;
    execute(block, out);
    return out;
  }

 private:
  // --- limits and errors -------------------------------------------------------------------------

  void charge(size_t steps) {
    steps_ += static_cast<int64_t>(std::min<size_t>(steps, kMaxSteps + 1));
    if (steps_ > kMaxSteps) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: the template takes more than {} steps; shorten the "
                              "conversation, or the template if it is short",
                              name_, line_, kMaxSteps));
    }
  }
  void charge_bytes(size_t bytes) { charge(bytes / 16 + 1); }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} line {}: {}; repair the template or download it again", name_,
                            line_, printable(what)));
  }
  [[noreturn]] void undefined(const Value& value) const {
    fail(fmt::format("'{}' is undefined", value.undefined()->name));
  }

  /// Runs `make`, which knows no place in the template, and adds the place to what it throws.
  template <class Make>
  auto located(Make&& make) const {
    try {
      return make();
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{} line {}: {}", name_, line_, error.what()));
    }
  }

  /// Counts a node for as long as it runs.
  class Level {
   public:
    explicit Level(Evaluator& evaluator) : depth_(evaluator.depth_) {
      if (depth_ >= kMaxDepth) {
        throw Error(ErrorCode::kUnsupported,
                    fmt::format("{} line {}: the template nests deeper than {} levels, as a macro "
                                "does that calls itself without end; repair the template",
                                evaluator.name_, evaluator.line_, kMaxDepth));
      }
      ++depth_;
    }
    ~Level() { --depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    int& depth_;
  };

  void open_scope() { scopes_.push_back(std::make_shared<Scope>()); }

  Value text_value(std::string text) {
    charge_bytes(text.size());
    return Value(std::move(text));
  }
  Value list_value(std::vector<Value> items, bool tuple = false) {
    charge(items.size());
    return located([&] { return make_list(std::move(items), tuple); });
  }

  // --- statements --------------------------------------------------------------------------------

  void emit(std::string_view text, std::string& out) {
    charge_bytes(text.size());
    if (out.size() + text.size() > kMaxOutputBytes) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: the prompt is longer than {} bytes; shorten it", name_,
                              line_, kMaxOutputBytes));
    }
    out += text;
  }

  Flow execute(const Block& block, std::string& out) {
    const Level level(*this);
    for (const auto& statement : block) {
      charge(1);
      line_ = statement->line;
      const Flow flow = execute(*statement, out);
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Flow execute(const Statement& statement, std::string& out) {
    switch (statement.kind) {
      case Statement::Kind::kText:
        emit(statement.text, out);
        return Flow::kNext;
      case Statement::Kind::kOutput: {
        const Value value = evaluate(*statement.expr);
        if (const std::string* text = value.text()) {
          emit(*text, out);
        } else {
          emit(to_text(value), out);
        }
        return Flow::kNext;
      }
      case Statement::Kind::kIf:
        for (const auto& [condition, body] : statement.branches) {
          if (condition == nullptr || evaluate(*condition).truthy()) return execute(body, out);
        }
        return Flow::kNext;
      case Statement::Kind::kFor:
        execute_for(statement, out);
        return Flow::kNext;
      case Statement::Kind::kSet: {
        Value value = evaluate(*statement.expr);
        if (statement.attribute.empty()) {
          assign(statement.names, std::move(value));
          return Flow::kNext;
        }
        const Value target = lookup(statement.names.front());
        if (target.name_space() == nullptr) fail("cannot assign attribute on non-namespace object");
        located([&] { target.name_space()->set(statement.attribute, std::move(value)); });
        return Flow::kNext;
      }
      case Statement::Kind::kSetBlock: {
        std::string text;
        open_scope();
        const Flow flow = execute(statement.body, text);
        scopes_.pop_back();
        assign(statement.names, text_value(std::move(text)));
        return flow;
      }
      case Statement::Kind::kScope: {
        open_scope();
        const Flow flow = execute(statement.body, out);
        scopes_.pop_back();
        return flow;
      }
      case Statement::Kind::kMacro:
        define_macro(statement);
        return Flow::kNext;
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  void execute_for(const Statement& statement, std::string& out) {
    std::vector<Value> items = iterate(evaluate(*statement.expr));
    if (statement.condition != nullptr) {
      std::vector<Value> kept;
      for (Value& item : items) {
        open_scope();
        assign(statement.names, item);
        if (evaluate(*statement.condition).truthy()) kept.push_back(std::move(item));
        scopes_.pop_back();
      }
      items = std::move(kept);
    }
    if (items.empty()) {
      open_scope();
      execute(statement.otherwise, out);
      scopes_.pop_back();
      return;
    }
    Loop loop;
    loop.items = list_value(std::move(items)).shared_list();
    for (; loop.index < loop.items->items.size(); ++loop.index) {
      charge(1);
      open_scope();
      assign(statement.names, loop.items->items[loop.index]);
      scopes_.back()->insert_or_assign("loop", Value(std::make_shared<const Loop>(loop)));
      const Flow flow = execute(statement.body, out);
      scopes_.pop_back();
      if (flow == Flow::kBreak) break;
    }
  }

  void assign(const std::vector<std::string>& names, Value value) {
    if (names.size() == 1) {
      scopes_.back()->insert_or_assign(names.front(), std::move(value));
      return;
    }
    const std::vector<Value> parts = iterate(value);
    if (parts.size() != names.size()) {
      fail(fmt::format("{} values for {} names", parts.size(), names.size()));
    }
    for (size_t i = 0; i < names.size(); ++i) {
      scopes_.back()->insert_or_assign(names[i], parts[i]);
    }
  }

  void define_macro(const Statement& statement) {
    constexpr size_t kMacroSteps = 64;  // it keeps its scopes until the end
    charge(kMacroSteps);
    auto macro = std::make_shared<Macro>();
    macro->definition = &statement;
    macro->scopes = scopes_;
    macros_.push_back(macro);
    scopes_.back()->insert_or_assign(statement.text,
                                     Value(std::shared_ptr<const Macro>(std::move(macro))));
  }

  /// Null if no scope has the name.
  const Value* find(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = (*scope)->find(name); found != (*scope)->end()) return &found->second;
    }
    return nullptr;
  }

  Value lookup(const std::string& name) const {
    if (const Value* value = find(name)) return *value;
    if (contains(kGlobals, name)) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: the name {} without a call is not supported by this "
                              "template engine; write the template without it",
                              name_, line_, name));
    }
    return Undefined{name};
  }

  // --- expressions -------------------------------------------------------------------------------

  Value evaluate(const Expr& expr) {
    const Level level(*this);
    charge(1);
    line_ = expr.line;
    switch (expr.kind) {
      case Kind::kConst:
        return expr.value;
      case Kind::kName:
        return lookup(expr.text);
      case Kind::kList:
      case Kind::kTuple:
        return list_value(evaluate_all(expr.args, 0), expr.kind == Kind::kTuple);
      case Kind::kDict:
        return evaluate_dict(expr);
      case Kind::kAttr:
        return attribute(evaluate(*expr.args[0]), expr.text);
      case Kind::kIndex: {
        const Value object = evaluate(*expr.args[0]);
        return subscript(object, evaluate(*expr.args[1]));
      }
      case Kind::kSlice:
        return slice(expr);
      case Kind::kCall:
        return call(expr);
      case Kind::kMethod: {
        const Value object = evaluate(*expr.args[0]);
        return method(expr, object, evaluate_all(expr.args, 1));
      }
      case Kind::kFilter: {
        const Value object = evaluate(*expr.args[0]);
        return filter(expr, expr.text, object, evaluate_all(expr.args, 1));
      }
      case Kind::kTest: {
        const Value subject = evaluate(*expr.args[0]);
        return Value(test(expr.text, subject, evaluate_all(expr.args, 1)));
      }
      case Kind::kNot:
        return Value(!evaluate(*expr.args[0]).truthy());
      case Kind::kNegate:
      case Kind::kPlus: {
        const Value value = evaluate(*expr.args[0]);
        return arithmetic(expr.kind == Kind::kPlus ? "+" : "-", Value(int64_t{0}), value);
      }
      case Kind::kAnd: {
        Value left = evaluate(*expr.args[0]);
        return left.truthy() ? evaluate(*expr.args[1]) : left;
      }
      case Kind::kOr: {
        Value left = evaluate(*expr.args[0]);
        return left.truthy() ? left : evaluate(*expr.args[1]);
      }
      case Kind::kBinary: {
        const Value left = evaluate(*expr.args[0]);
        const Value right = evaluate(*expr.args[1]);
        line_ = expr.line;
        return binary(expr.text, left, right);
      }
      case Kind::kCompare:
        return evaluate_compare(expr);
      case Kind::kCondition:
        if (evaluate(*expr.args[0]).truthy()) return evaluate(*expr.args[1]);
        return expr.args[2] ? evaluate(*expr.args[2]) : Value(Undefined{"an if without else"});
    }
    return Value();
  }

  std::vector<Value> evaluate_all(const std::vector<std::unique_ptr<Expr>>& args, size_t first) {
    std::vector<Value> values;
    for (size_t i = first; i < args.size(); ++i) values.push_back(evaluate(*args[i]));
    return values;
  }

  Value evaluate_dict(const Expr& expr) {
    std::vector<std::pair<Value, Value>> items;
    for (size_t i = 0; i < expr.args.size(); i += 2) {
      Value key = evaluate(*expr.args[i]);
      if (key.list() || key.dict()) fail("a list or dict cannot be a key");
      Value value = evaluate(*expr.args[i + 1]);
      charge(items.size());
      const auto old =
          std::ranges::find_if(items, [&](const auto& item) { return equal(item.first, key); });
      if (old != items.end()) {
        old->second = std::move(value);
      } else {
        items.emplace_back(std::move(key), std::move(value));
      }
    }
    return located([&] { return make_dict(std::move(items)); });
  }

  Value evaluate_compare(const Expr& expr) {
    Value left = evaluate(*expr.args[0]);
    for (size_t i = 0; i < expr.ops.size(); ++i) {
      Value right = evaluate(*expr.args[i + 1]);
      line_ = expr.line;
      if (!compare(expr.ops[i], left, right)) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  }

  bool compare(std::string_view op, const Value& left, const Value& right) {
    if (op == "==") return equal(left, right);
    if (op == "!=") return !equal(left, right);
    if (op == "in") return is_in(left, right);
    if (op == "not in") return !is_in(left, right);
    if (op == "<") return less(left, right);
    if (op == ">") return less(right, left);
    // Not !less(): nothing holds for a NaN.
    if (op == "<=") return less(left, right) || equal(left, right);
    return less(right, left) || equal(left, right);
  }

  bool equal(const Value& a, const Value& b) {
    charge(1);
    if (a.is_number() && b.is_number()) {
      if (a.real() || b.real()) return a.as_real() == b.as_real();
      return a.as_integer() == b.as_integer();
    }
    if (a.text() && b.text()) {
      charge_bytes(a.text()->size());
      return *a.text() == *b.text();
    }
    if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
    if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
    if (a.list() && b.list()) {
      const auto& left = a.list()->items;
      const auto& right = b.list()->items;
      const bool alike =
          a.list()->tuple == b.list()->tuple && a.list()->range.empty() == b.list()->range.empty();
      if (!alike || left.size() != right.size()) return false;
      for (size_t i = 0; i < left.size(); ++i) {
        if (!equal(left[i], right[i])) return false;
      }
      return true;
    }
    if (a.dict() && b.dict()) {
      const auto& left = a.dict()->items;
      if (left.size() != b.dict()->items.size()) return false;
      for (const auto& [key, value] : left) {
        const Value* other = find_key(*b.dict(), key);
        if (other == nullptr || !equal(value, *other)) return false;
      }
      return true;
    }
    if (a.name_space() || b.name_space()) return a.name_space() == b.name_space();
    if (a.macro() || b.macro()) return a.macro() == b.macro();
    return a.loop() && a.loop() == b.loop();
  }

  bool less(const Value& a, const Value& b) {
    charge(1);
    if (a.is_undefined()) undefined(a);
    if (b.is_undefined()) undefined(b);
    if (a.is_number() && b.is_number()) {
      if (a.real() || b.real()) return a.as_real() < b.as_real();
      return a.as_integer() < b.as_integer();
    }
    if (a.text() && b.text()) {
      charge_bytes(a.text()->size());
      return *a.text() < *b.text();
    }
    if (a.list() && b.list() && a.list()->tuple == b.list()->tuple) {
      const auto& left = a.list()->items;
      const auto& right = b.list()->items;
      for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
        if (!equal(left[i], right[i])) return less(left[i], right[i]);
      }
      return left.size() < right.size();
    }
    fail(fmt::format("cannot order {} and {}", a.type_name(), b.type_name()));
  }

  bool is_in(const Value& item, const Value& container) {
    if (container.text()) {
      if (item.is_undefined()) undefined(item);
      if (!item.text()) fail(fmt::format("{} in a str", item.type_name()));
      charge_bytes(container.text()->size() + item.text()->size());
      return find_text(*container.text(), *item.text()) != std::string::npos;
    }
    if (container.dict()) return find_key(*container.dict(), item) != nullptr;
    if (container.list()) {
      return std::ranges::any_of(container.list()->items,
                                 [&](const Value& other) { return equal(item, other); });
    }
    if (container.is_undefined()) return false;
    fail(fmt::format("{} is not a container", container.type_name()));
  }

  const Value* find_key(const Dict& dict, const Value& key) {
    for (const auto& [name, value] : dict.items) {
      if (equal(name, key)) return &value;
    }
    return nullptr;
  }

  Value binary(const std::string& op, const Value& left, const Value& right) {
    if (op == "~") return text_value(to_text(left) + to_text(right));
    if (left.is_undefined()) undefined(left);
    if (right.is_undefined()) undefined(right);
    if (op == "+" && left.text() && right.text()) {
      charge_bytes(left.text()->size() + right.text()->size());
      return text_value(*left.text() + *right.text());
    }
    for (const Value* value : {&left, &right}) {
      if (value->list() && !value->list()->range.empty()) return arithmetic(op, left, right);
    }
    if (op == "+" && left.list() && right.list() && left.list()->tuple == right.list()->tuple) {
      std::vector<Value> items = left.list()->items;
      items.insert(items.end(), right.list()->items.begin(), right.list()->items.end());
      return list_value(std::move(items), left.list()->tuple);
    }
    if (op == "*" && (left.text() || left.list()) && (right.integer() || right.boolean())) {
      return repeat(left, right.as_integer());
    }
    if (op == "*" && (right.text() || right.list()) && (left.integer() || left.boolean())) {
      return repeat(right, left.as_integer());
    }
    if (op == "%" && left.text()) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: formatting with % is not supported by this template "
                              "engine; write the template without it",
                              name_, line_));
    }
    return arithmetic(op, left, right);
  }

  Value repeat(const Value& value, int64_t times) {
    const auto count = static_cast<size_t>(std::max<int64_t>(times, 0));
    const size_t size = value.text() ? value.text()->size() / 16 + 1 : value.list()->items.size();
    if (size > 0 && count > static_cast<size_t>(kMaxSteps) / size) charge(kMaxSteps);
    charge(size * count + 1);
    if (value.text()) {
      std::string text;
      if (value.text()->empty()) return Value(std::move(text));
      for (size_t i = 0; i < count; ++i) text += *value.text();
      return Value(std::move(text));
    }
    std::vector<Value> items;
    if (size == 0) return value;
    for (size_t i = 0; i < count; ++i) {
      items.insert(items.end(), value.list()->items.begin(), value.list()->items.end());
    }
    return list_value(std::move(items), value.list()->tuple);
  }

  Value arithmetic(const std::string& op, const Value& left, const Value& right) {
    for (const Value* value : {&left, &right}) {
      if (value->is_undefined()) undefined(*value);
    }
    if (!left.is_number() || !right.is_number()) {
      fail(fmt::format("cannot compute {} {} {}", left.type_name(), op, right.type_name()));
    }
    if (left.real() || right.real() || op == "/") {
      const double a = left.as_real();
      const double b = right.as_real();
      if (op == "+") return Value(a + b);
      if (op == "-") return Value(a - b);
      if (op == "*") return Value(a * b);
      if (b == 0) fail("division by zero");
      if (op == "/") return Value(a / b);
      const double floor = std::floor(a / b);
      return op == "//" ? Value(floor) : Value(a - floor * b);
    }
    const int64_t a = left.as_integer();
    const int64_t b = right.as_integer();
    int64_t result = 0;
    bool overflow = false;
    if (op == "+") {
      overflow = __builtin_add_overflow(a, b, &result);
    } else if (op == "-") {
      overflow = __builtin_sub_overflow(a, b, &result);
    } else if (op == "*") {
      overflow = __builtin_mul_overflow(a, b, &result);
    } else {
      if (b == 0) fail("division by zero");
      overflow = a == std::numeric_limits<int64_t>::min() && b == -1;
      if (!overflow) {
        // Python rounds towards minus infinity.
        const bool adjust = a % b != 0 && (a < 0) != (b < 0);
        result = op == "//" ? a / b - (adjust ? 1 : 0) : a % b + (adjust ? b : 0);
      }
    }
    if (overflow) fail("a number exceeds 64 bits");
    return Value(result);
  }

  // --- access ------------------------------------------------------------------------------------

  Value attribute(const Value& object, const std::string& name) {
    if (object.is_undefined()) undefined(object);
    if (object.loop()) return object.loop()->attribute(name);
    if (object.macro()) fail(fmt::format("an attribute {} of a macro", name));
    if (const Namespace* space = object.name_space()) {
      const Value* value = space->find(name);
      return value != nullptr ? *value : Value(Undefined{name});
    }
    if (const Dict* dict = object.dict()) {
      charge(dict->items.size());
      const Value* value = dict->find(name);
      return value != nullptr ? *value : Value(Undefined{name});
    }
    return Undefined{name};
  }

  Value subscript(const Value& object, const Value& key) {
    if (object.is_undefined()) undefined(object);
    if (const Dict* dict = object.dict()) {
      const Value* value = find_key(*dict, key);
      if (value != nullptr) return *value;
    } else if (object.list() && (key.integer() || key.boolean())) {
      const auto& items = object.list()->items;
      if (const auto index = index_of(key.as_integer(), items.size())) return items[*index];
    } else if (object.text() && (key.integer() || key.boolean())) {
      const std::vector<std::string_view> chars = characters(*object.text());
      if (const auto index = index_of(key.as_integer(), chars.size())) {
        return Value(std::string(chars[*index]));
      }
    } else if (key.text() && (object.name_space() || object.loop())) {
      return attribute(object, *key.text());
    }
    return Undefined{to_text(key)};
  }

  static std::optional<size_t> index_of(int64_t index, size_t size) {
    if (index < 0) index += static_cast<int64_t>(size);
    if (index < 0 || index >= static_cast<int64_t>(size)) return std::nullopt;
    return static_cast<size_t>(index);
  }

  std::vector<std::string_view> characters(const std::string& text) {
    charge(text.size());
    std::vector<std::string_view> chars;
    for (size_t pos = 0; pos < text.size();) {
      const size_t bytes = utf8_step(text, pos).bytes;
      chars.push_back(std::string_view(text).substr(pos, bytes));
      pos += bytes;
    }
    return chars;
  }

  Value slice(const Expr& expr) {
    const Value object = evaluate(*expr.args[0]);
    std::array<std::optional<int64_t>, 3> bounds;
    for (size_t i = 0; i < 3; ++i) {
      if (!expr.args[i + 1]) continue;
      const Value bound = evaluate(*expr.args[i + 1]);
      if (bound.is_none()) continue;
      if (!bound.integer() && !bound.boolean()) fail("a slice index is not an integer");
      bounds[i] = bound.as_integer();
    }
    if (object.is_undefined()) undefined(object);
    if (!object.list() && !object.text()) {
      fail(fmt::format("cannot slice {}", object.type_name()));
    }
    if (object.list() && !object.list()->range.empty()) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: a slice of a range is not supported by this template "
                              "engine; make a list of it first",
                              name_, line_));
    }
    std::vector<std::string_view> chars;
    if (object.text()) chars = characters(*object.text());
    const auto size =
        static_cast<int64_t>(object.text() ? chars.size() : object.list()->items.size());
    const int64_t step = bounds[2].value_or(1);
    if (step == 0) fail("a slice step of zero");
    // As PySlice_AdjustIndices.
    const auto adjust = [&](std::optional<int64_t> bound, int64_t fallback) {
      if (!bound) return fallback;
      int64_t value = *bound;
      if (value < 0) {
        value = value < -size ? (step < 0 ? -1 : 0) : value + size;
      } else if (value >= size) {
        value = step < 0 ? size - 1 : size;
      }
      return value;
    };
    const int64_t start = adjust(bounds[0], step < 0 ? size - 1 : 0);
    const int64_t stop = adjust(bounds[1], step < 0 ? -1 : size);
    std::string text;
    std::vector<Value> items;
    for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
      charge(1);
      if (object.text()) {
        text += chars[static_cast<size_t>(i)];
      } else {
        items.push_back(object.list()->items[static_cast<size_t>(i)]);
      }
      if (__builtin_add_overflow(i, step, &i)) break;
    }
    if (object.text()) return text_value(std::move(text));
    return list_value(std::move(items), object.list()->tuple);
  }

  std::vector<Value> iterate(const Value& value) {
    if (value.list()) {
      charge(value.list()->items.size());
      return value.list()->items;
    }
    std::vector<Value> items;
    if (value.text()) {
      for (const std::string_view c : characters(*value.text())) {
        items.emplace_back(std::string(c));
      }
    } else if (value.dict()) {
      charge(value.dict()->items.size());
      for (const auto& [key, item] : value.dict()->items) items.push_back(key);
    } else if (!value.is_undefined()) {
      fail(fmt::format("{} is not iterable", value.type_name()));
    }
    return items;
  }

  // --- functions, methods ------------------------------------------------------------------------

  void no_named(const Expr& expr) const {
    if (!expr.named.empty()) {
      fail(fmt::format("{} takes no argument {}", expr.text, expr.named.front().first));
    }
  }
  /// The arguments by position; throws unless there are min to max of them.
  void count(const Expr& expr, const std::vector<Value>& args, size_t min, size_t max) const {
    if (args.size() < min || args.size() > max) {
      fail(fmt::format("{} got {} arguments; expected {} to {}", expr.text, args.size(), min, max));
    }
  }
  const std::string& text_argument(const Expr& expr, const Value& value) const {
    if (!value.text()) fail(fmt::format("{} got {}; expected str", expr.text, value.type_name()));
    return *value.text();
  }
  int64_t integer_argument(const Expr& expr, const Value& value) const {
    if (!value.integer() && !value.boolean()) {
      fail(fmt::format("{} got {}; expected int", expr.text, value.type_name()));
    }
    return value.as_integer();
  }

  /// As Jinja2: given arguments by position, then by name; then the others' defaults, which may
  /// name the arguments before them; without a default an argument is undefined.
  Value call_macro(const Expr& expr, Macro macro) {
    const Statement& definition = *macro.definition;
    const std::vector<std::string>& names = definition.names;
    std::vector<Value> args = evaluate_all(expr.args, 0);
    count(expr, args, 0, names.size());
    auto scope = std::make_shared<Scope>();
    for (size_t i = 0; i < names.size(); ++i) {
      scope->emplace(names[i], i < args.size() ? std::move(args[i]) : Value(Undefined{names[i]}));
    }
    std::vector<bool> given(names.size());
    std::fill_n(given.begin(), args.size(), true);
    for (const auto& [key, argument] : expr.named) {
      charge(names.size());
      const auto place = std::ranges::find(names, key);
      const auto index = static_cast<size_t>(place - names.begin());
      if (place == names.end())
        fail(fmt::format("the macro {} has no argument {}", expr.text, key));
      if (given[index]) fail(fmt::format("the macro {} got two of {}", expr.text, key));
      scope->insert_or_assign(key, evaluate(*argument));
      given[index] = true;
    }
    charge(names.size());
    macro.scopes.push_back(scope);
    std::vector<std::shared_ptr<Scope>> outer = std::exchange(scopes_, std::move(macro.scopes));
    const size_t required = names.size() - definition.defaults.size();
    for (size_t i = required; i < names.size(); ++i) {
      if (!given[i])
        scope->insert_or_assign(names[i], evaluate(*definition.defaults[i - required]));
    }
    std::string text;
    execute(definition.body, text);
    scopes_ = std::move(outer);
    line_ = expr.line;
    return text_value(std::move(text));
  }

  Value call(const Expr& expr) {
    if (const Value* value = find(expr.text)) {
      if (value->macro() != nullptr) return call_macro(expr, *value->macro());
      fail(fmt::format("{} is {}, which cannot be called", expr.text, value->type_name()));
    }
    if (!is_function(expr.text)) undefined(Undefined{expr.text});
    std::vector<Value> args = evaluate_all(expr.args, 0);
    if (expr.text == "namespace") {
      count(expr, args, 0, 1);
      auto space = std::make_shared<Namespace>();
      if (!args.empty()) {
        if (!args[0].dict()) fail("namespace takes a dict or named arguments");
        for (const auto& [key, value] : args[0].dict()->items) {
          const std::string& attribute_name = text_argument(expr, key);
          located([&, &value = value] { space->set(attribute_name, value); });
        }
      }
      for (const auto& [key, argument] : expr.named) {
        Value value = evaluate(*argument);
        located([&, &attribute_name = key] { space->set(attribute_name, std::move(value)); });
      }
      return Value(std::move(space));
    }
    no_named(expr);
    if (expr.text == "raise_exception") {
      count(expr, args, 1, 1);
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {}; this checkpoint's chat template refuses the conversation, "
                              "so change the prompt, its images or the system message",
                              name_, printable(to_text(args[0]))));
    }
    count(expr, args, 1, 3);
    const int64_t start = args.size() > 1 ? integer_argument(expr, args[0]) : 0;
    const int64_t stop = integer_argument(expr, args[args.size() > 1 ? 1 : 0]);
    const int64_t step = args.size() > 2 ? integer_argument(expr, args[2]) : 1;
    if (step == 0) fail("range with a step of zero");
    std::vector<Value> items;
    for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
      charge(1);
      items.emplace_back(i);
      if (__builtin_add_overflow(i, step, &i)) break;
    }
    auto range = std::make_shared<List>();
    range->items = std::move(items);
    range->range = step == 1 ? fmt::format("range({}, {})", start, stop)
                             : fmt::format("range({}, {}, {})", start, stop, step);
    return Value(std::shared_ptr<const List>(std::move(range)));
  }

  Value method(const Expr& expr, const Value& object, const std::vector<Value>& args) {
    line_ = expr.line;
    no_named(expr);
    if (object.is_undefined()) undefined(object);
    if (object.dict()) return dict_method(expr, *object.dict(), args);
    if (object.text()) return text_method(expr, *object.text(), args);
    fail(fmt::format("{} has no method {}", object.type_name(), expr.text));
  }

  Value dict_method(const Expr& expr, const Dict& dict, const std::vector<Value>& args) {
    if (expr.text == "get") {
      count(expr, args, 1, 2);
      const Value* value = find_key(dict, args[0]);
      if (value != nullptr) return *value;
      return args.size() > 1 ? args[1] : Value();
    }
    const bool keys = expr.text == "keys";
    const bool values = expr.text == "values";
    if (!keys && !values && expr.text != "items") {
      fail(fmt::format("dict has no method {}", expr.text));
    }
    count(expr, args, 0, 0);
    std::vector<Value> items;
    for (const auto& [key, value] : dict.items) {
      items.push_back(keys ? key : values ? value : list_value({key, value}, true));
    }
    return list_value(std::move(items));
  }

  Value text_method(const Expr& expr, const std::string& text, const std::vector<Value>& args) {
    const std::string& name = expr.text;
    charge_bytes(text.size());
    if (name == "upper" || name == "lower" || name == "title" || name == "capitalize") {
      count(expr, args, 0, 0);
      return change_case(name, text);
    }
    if (name == "strip" || name == "lstrip" || name == "rstrip") {
      count(expr, args, 0, 1);
      const bool given = !args.empty() && !args[0].is_none();
      return text_value(strip(text, given ? &text_argument(expr, args[0]) : nullptr,
                              name != "rstrip", name != "lstrip"));
    }
    if (name == "split") {
      count(expr, args, 0, 2);
      const bool given = !args.empty() && !args[0].is_none();
      const std::string* separator = given ? &text_argument(expr, args[0]) : nullptr;
      if (given && separator->empty()) fail("split by an empty separator");
      const int64_t times = args.size() > 1 ? integer_argument(expr, args[1]) : -1;
      std::vector<Value> parts;
      split(text, separator, times,
            [&](std::string_view part) { parts.push_back(text_value(std::string(part))); });
      return list_value(std::move(parts));
    }
    if (name == "startswith" || name == "endswith") {
      count(expr, args, 1, 1);
      const auto matches = [&](const Value& affix) {
        const std::string& part = text_argument(expr, affix);
        charge_bytes(part.size());
        return name == "startswith" ? text.starts_with(part) : text.ends_with(part);
      };
      if (args[0].list() && args[0].list()->tuple) {
        return Value(std::ranges::any_of(args[0].list()->items, matches));
      }
      return Value(matches(args[0]));
    }
    if (name == "replace") {
      count(expr, args, 2, 3);
      return replace(text, text_argument(expr, args[0]), text_argument(expr, args[1]),
                     args.size() > 2 ? integer_argument(expr, args[2]) : -1);
    }
    if (name == "find") {
      count(expr, args, 1, 1);
      const size_t found = find_text(text, text_argument(expr, args[0]));
      if (found == std::string::npos) return Value(int64_t{-1});
      return Value(static_cast<int64_t>(characters(text.substr(0, found)).size()));
    }
    fail(fmt::format("str has no method {}", name));
  }

  Value change_case(const std::string& name, const std::string& text) {
    if (name == "upper") return text_value(to_upper(text));
    if (name == "lower") return text_value(to_lower(text));
    return text_value(name == "title" ? to_title(text) : to_capitalized(text));
  }

  Value replace(const std::string& text, const std::string& from, const std::string& to,
                int64_t times) {
    size_t count = text.size() + 1;  // how often at most
    if (!from.empty()) {
      count = 0;
      charge_bytes(text.size() + from.size());
      for (size_t at = 0; (at = find_text(text, from, at)) != std::string::npos;
           at += from.size()) {
        ++count;
      }
    }
    charge(count);
    charge(count * (to.size() / 16 + 1));
    return text_value(replaced(text, from, to, times));
  }

  // --- filters, tests ----------------------------------------------------------------------------

  /// A named argument of a filter, or null.
  const Expr* named_argument(const Expr& expr, std::string_view name) const {
    const auto found = std::ranges::find_if(
        expr.named, [&](const auto& argument) { return argument.first == name; });
    return found == expr.named.end() ? nullptr : found->second.get();
  }
  void only_named(const Expr& expr, std::initializer_list<std::string_view> allowed) const {
    for (const auto& [name, value] : expr.named) {
      if (std::ranges::find(allowed, name) == allowed.end()) {
        throw Error(ErrorCode::kUnsupported,
                    fmt::format("{} line {}: the argument {} of the filter {} is not supported by "
                                "this template engine; write the template without it",
                                name_, line_, printable(name), expr.text));
      }
    }
  }

  Value filter(const Expr& expr, const std::string& name, const Value& object,
               std::vector<Value> args) {
    line_ = expr.line;
    if (name == "selectattr" || name == "rejectattr" || name == "select" || name == "reject") {
      return select(expr, object, args);
    }
    if (name == "map") return map(expr, object, args);
    if (name == "join") {
      only_named(expr, {"d", "attribute"});
      count(expr, args, 0, 2);
      const Expr* separator = named_argument(expr, "d");
      const Expr* attribute_name = named_argument(expr, "attribute");
      std::string between;
      if (!args.empty()) between = to_text(args[0]);
      if (separator != nullptr) between = to_text(evaluate(*separator));
      std::optional<Value> path;
      if (args.size() > 1) path = args[1];
      if (attribute_name != nullptr) path = evaluate(*attribute_name);
      std::string text;
      bool first = true;
      for (const Value& item : iterate(object)) {
        if (!first) text += between;
        first = false;
        text += to_text(path ? follow(item, *path) : item);
        charge_bytes(between.size());
      }
      return text_value(std::move(text));
    }
    if (name == "tojson") {
      only_named(expr, {"indent", "ensure_ascii"});
      count(expr, args, 0, 0);
      std::optional<int> indent;
      if (const Expr* argument = named_argument(expr, "ensure_ascii")) {
        if (evaluate(*argument).truthy()) fail("tojson with ensure_ascii is not supported");
      }
      if (const Expr* argument = named_argument(expr, "indent")) {
        const Value value = evaluate(*argument);
        if (!value.is_none()) {
          indent = static_cast<int>(std::clamp<int64_t>(integer_argument(expr, value), 0, 16));
        }
      }
      std::string text;
      write_json(object, indent, 0, text);
      return text_value(std::move(text));
    }
    if (name == "default" || name == "d") {
      only_named(expr, {"default_value", "boolean"});
      count(expr, args, 0, 2);
      const Expr* fallback = named_argument(expr, "default_value");
      const Expr* boolean = named_argument(expr, "boolean");
      const bool falsy =
          args.size() > 1 ? args[1].truthy() : boolean != nullptr && evaluate(*boolean).truthy();
      if (!object.is_undefined() && !(falsy && !object.truthy())) return object;
      if (!args.empty()) return args[0];
      return fallback != nullptr ? evaluate(*fallback) : Value("");
    }
    only_named(expr, {});
    return plain_filter(expr, name, object, args);
  }

  /// The filters without named arguments.
  Value plain_filter(const Expr& expr, const std::string& name, const Value& object,
                     const std::vector<Value>& args) {
    if (name == "trim") {
      count(expr, args, 0, 1);
      const bool given = !args.empty() && !args[0].is_none();
      return text_value(
          strip(to_text(object), given ? &text_argument(expr, args[0]) : nullptr, true, true));
    }
    if (name == "replace") {
      count(expr, args, 2, 3);
      return replace(to_text(object), to_text(args[0]), to_text(args[1]),
                     args.size() > 2 ? integer_argument(expr, args[2]) : -1);
    }
    if (name == "attr") {
      count(expr, args, 1, 1);
      // Only what is an attribute in Python: a dict's keys are none.
      if (object.dict() || object.list() || object.text()) {
        return Undefined{text_argument(expr, args[0])};
      }
      return attribute(object, text_argument(expr, args[0]));
    }
    if (name == "int" || name == "float") {
      count(expr, args, 0, 1);
      return name == "int" ? to_int(object, args) : to_float(object, args);
    }
    count(expr, args, 0, 0);
    if (name == "length" || name == "count") return length(object);
    if (name == "title") return text_value(to_title_words(to_text(object)));
    if (name == "upper" || name == "lower" || name == "capitalize") {
      return change_case(name, to_text(object));
    }
    if (name == "list") return list_value(iterate(object));
    if (name == "string") return text_value(to_text(object));
    if (name == "safe") return object;
    if (name == "items") {
      if (object.is_undefined()) return list_value({});
      if (!object.dict()) fail(fmt::format("items of {}", object.type_name()));
      return dict_method(expr, *object.dict(), {});
    }
    if (name == "abs") {
      if (!object.is_number()) fail(fmt::format("abs of {}", object.type_name()));
      if (object.real()) return Value(std::fabs(*object.real()));
      return object.as_integer() < 0 ? arithmetic("-", Value(int64_t{0}), object)
                                     : Value(object.as_integer());
    }
    std::vector<Value> items = iterate(object);
    if (name == "first" || name == "last") {
      if (items.empty()) return Undefined{"the " + name + " of nothing"};
      return name == "first" ? items.front() : items.back();
    }
    if (name == "reverse") {
      std::ranges::reverse(items);
      if (!object.text()) return list_value(std::move(items));
      std::string text;
      for (const Value& item : items) text += *item.text();
      return text_value(std::move(text));
    }
    std::vector<Value> seen;  // unique: strings without regard to case, as in Jinja2
    std::vector<Value> kept;
    for (const Value& item : items) {
      Value key = item.text() ? Value(to_lower(*item.text())) : item;
      if (std::ranges::any_of(seen, [&](const Value& other) { return equal(key, other); }))
        continue;
      seen.push_back(std::move(key));
      kept.push_back(item);
    }
    return list_value(std::move(kept));
  }

  Value length(const Value& object) {
    if (object.text()) return Value(static_cast<int64_t>(characters(*object.text()).size()));
    if (object.list()) return Value(static_cast<int64_t>(object.list()->items.size()));
    if (object.dict()) return Value(static_cast<int64_t>(object.dict()->items.size()));
    if (object.is_undefined()) return Value(int64_t{0});
    if (object.loop()) return object.loop()->attribute("length");
    fail(fmt::format("{} has no length", object.type_name()));
  }

  Value to_int(const Value& object, const std::vector<Value>& args) {
    const Value fallback = args.empty() ? Value(int64_t{0}) : args[0];
    if (object.integer() || object.boolean()) return Value(object.as_integer());
    std::optional<double> real;
    if (object.real()) real = *object.real();
    if (object.text()) {
      const std::string text = strip(*object.text(), nullptr, true, true);
      int64_t value = 0;
      const size_t sign = text.starts_with('+') ? 1 : 0;
      const auto [end, status] =
          std::from_chars(text.data() + sign, text.data() + text.size(), value);
      if (status == std::errc() && end == text.data() + text.size()) return Value(value);
      real = parse_real(text);
    }
    if (!real || !(std::fabs(*real) < 9.2e18)) return fallback;
    return Value(static_cast<int64_t>(*real));
  }

  Value to_float(const Value& object, const std::vector<Value>& args) {
    if (object.is_number()) return Value(object.as_real());
    if (object.text()) {
      if (const auto real = parse_real(strip(*object.text(), nullptr, true, true))) {
        return Value(*real);
      }
    }
    return args.empty() ? Value(0.0) : args[0];
  }

  static std::optional<double> parse_real(std::string_view text) {
    if (text.starts_with('+')) text.remove_prefix(1);
    double value = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || status != std::errc() || end != text.data() + text.size()) {
      return std::nullopt;
    }
    return value;
  }

  /// An attribute path such as "function.name", or an index.
  Value follow(const Value& object, const Value& path) {
    if (!path.text()) return subscript(object, path);
    Value value = object;
    split(*path.text(), &kDot, -1, [&](std::string_view step) {
      charge_bytes(step.size());
      int64_t index = 0;
      const auto [end, status] = std::from_chars(step.data(), step.data() + step.size(), index);
      const bool number = status == std::errc() && end == step.data() + step.size();
      value = subscript(value, number ? Value(index) : Value(std::string(step)));
    });
    return value;
  }

  Value select(const Expr& expr, const Value& object, const std::vector<Value>& args) {
    only_named(expr, {});
    const bool by_attribute = expr.text.ends_with("attr");
    const bool keep = expr.text.starts_with("select");
    size_t next = 0;
    if (by_attribute && args.empty()) fail(expr.text + " without an attribute");
    const Value path = by_attribute ? args[next++] : Value();
    std::optional<std::string> test_name;
    if (next < args.size()) test_name = text_argument(expr, args[next++]);
    if (test_name && !is_test(*test_name)) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: the test {} is not supported by this template engine; "
                              "write the template without it",
                              name_, line_, printable(*test_name)));
    }
    const std::vector<Value> rest(args.begin() + static_cast<std::ptrdiff_t>(next), args.end());
    std::vector<Value> kept;
    for (const Value& item : iterate(object)) {
      const Value subject = by_attribute ? follow(item, path) : item;
      const bool passes = test_name ? test(*test_name, subject, rest) : subject.truthy();
      if (passes == keep) kept.push_back(item);
    }
    return list_value(std::move(kept));
  }

  Value map(const Expr& expr, const Value& object, const std::vector<Value>& args) {
    only_named(expr, {"attribute", "default"});
    std::vector<Value> mapped;
    if (const Expr* attribute_name = named_argument(expr, "attribute")) {
      const Value path = evaluate(*attribute_name);
      const Expr* fallback = named_argument(expr, "default");
      for (const Value& item : iterate(object)) {
        Value value = follow(item, path);
        if (value.is_undefined() && fallback != nullptr) value = evaluate(*fallback);
        mapped.push_back(std::move(value));
      }
      return list_value(std::move(mapped));
    }
    if (args.empty()) fail("map without a filter or attribute");
    const std::string& name = text_argument(expr, args[0]);
    for (const char* nested : {"map", "select", "reject", "selectattr", "rejectattr"}) {
      if (name == nested) fail(fmt::format("map with the filter {}", name));
    }
    if (!is_filter(name) || !expr.named.empty()) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} line {}: map with the filter {} is not supported by this "
                              "template engine; write the template without it",
                              name_, line_, printable(name)));
    }
    for (const Value& item : iterate(object)) {
      mapped.push_back(filter(expr, name, item, {args.begin() + 1, args.end()}));
    }
    return list_value(std::move(mapped));
  }

  bool test(const std::string& name, const Value& subject, const std::vector<Value>& args) {
    charge(1);
    const auto argument = [&]() -> const Value& {
      if (args.size() != 1) fail(fmt::format("the test {} takes one argument", name));
      return args[0];
    };
    if (name == "equalto" || name == "eq" || name == "==") return equal(subject, argument());
    if (name == "ne" || name == "!=") return !equal(subject, argument());
    if (name == "lt" || name == "lessthan" || name == "<") return compare("<", subject, argument());
    if (name == "gt" || name == "greaterthan" || name == ">") {
      return compare(">", subject, argument());
    }
    if (name == "le" || name == "<=") return compare("<=", subject, argument());
    if (name == "ge" || name == ">=") return compare(">=", subject, argument());
    if (name == "in") return is_in(subject, argument());
    if (name == "divisibleby") return arithmetic("%", subject, argument()).as_real() == 0;
    if (!args.empty()) fail(fmt::format("the test {} takes no argument", name));
    if (name == "defined") return !subject.is_undefined();
    if (name == "undefined") return subject.is_undefined();
    if (name == "none") return subject.is_none();
    if (name == "string") return subject.text() != nullptr;
    if (name == "mapping") return subject.dict() != nullptr;
    if (name == "iterable" || name == "sequence") {
      return subject.text() || subject.list() || subject.dict() || subject.is_undefined() ||
             (name == "iterable" && subject.loop());
    }
    if (name == "number") return subject.is_number();
    if (name == "integer") return subject.integer() != nullptr;
    if (name == "float") return subject.real() != nullptr;
    if (name == "boolean") return subject.boolean() != nullptr;
    if (name == "true") return subject.boolean() && *subject.boolean();
    if (name == "false") return subject.boolean() && !*subject.boolean();
    if (name == "odd" || name == "even") {
      const double rest = arithmetic("%", subject, Value(int64_t{2})).as_real();
      return rest == (name == "odd" ? 1 : 0);
    }
    const std::string text = to_text(subject);
    const std::string upper = to_upper(text);
    const std::string lower = to_lower(text);
    return upper != lower && text == (name == "lower" ? lower : upper);
  }

  // --- text --------------------------------------------------------------------------------------

  /// Python's str().
  std::string to_text(const Value& value) {
    if (value.text()) return *value.text();
    if (value.is_undefined()) return "";
    std::string text;
    write_repr(value, text);
    charge_bytes(text.size());
    return text;
  }

  /// Python's repr().
  void write_repr(const Value& value, std::string& out) {
    charge_bytes(value.text() ? value.text()->size() : 1);
    if (value.text()) {
      out += quoted(*value.text());
    } else if (value.list()) {
      const List& list = *value.list();
      if (!list.range.empty()) {
        out += list.range;
        return;
      }
      out += list.tuple ? '(' : '[';
      for (size_t i = 0; i < list.items.size(); ++i) {
        if (i > 0) out += ", ";
        write_repr(list.items[i], out);
      }
      if (list.tuple && list.items.size() == 1) out += ',';
      out += list.tuple ? ')' : ']';
    } else if (value.dict()) {
      out += '{';
      bool first = true;
      for (const auto& [key, item] : value.dict()->items) {
        if (!first) out += ", ";
        first = false;
        write_repr(key, out);
        out += ": ";
        write_repr(item, out);
      }
      out += '}';
    } else {
      out += scalar_text(value);
    }
  }

  std::string scalar_text(const Value& value) const {
    if (value.is_none()) return "None";
    if (value.is_undefined()) return "Undefined";
    if (value.boolean()) return *value.boolean() ? "True" : "False";
    if (value.integer()) return fmt::format("{}", *value.integer());
    if (value.real()) return real_text(*value.real());
    if (value.macro()) return fmt::format("<Macro {}>", quoted(value.macro()->definition->text));
    fail(fmt::format("printing a {}", value.type_name()));
  }

  /// json.dumps(value, ensure_ascii=False, indent=indent).
  void write_json(const Value& value, std::optional<int> indent, int level, std::string& out) {
    charge_bytes(value.text() ? value.text()->size() : 1);
    const auto line_break = [&](int inner) {
      if (!indent) return;
      out += '\n';
      const size_t spaces = static_cast<size_t>(*indent) * static_cast<size_t>(inner);
      out.append(spaces, ' ');
      charge_bytes(spaces);
    };
    const auto separate = [&](bool first) {
      if (!first) out += indent ? "," : ", ";
      line_break(level + 1);
    };
    if (value.text()) {
      out += json_quoted(*value.text());
    } else if (value.list()) {
      if (!value.list()->range.empty()) fail("range in tojson");
      const auto& items = value.list()->items;
      out += '[';
      for (size_t i = 0; i < items.size(); ++i) {
        separate(i == 0);
        write_json(items[i], indent, level + 1, out);
      }
      if (!items.empty()) line_break(level);
      out += ']';
    } else if (value.dict()) {
      const auto& items = value.dict()->items;
      out += '{';
      for (size_t i = 0; i < items.size(); ++i) {
        separate(i == 0);
        const Value& key = items[i].first;
        std::string name = key.text() ? *key.text() : scalar_text(key);
        if (key.is_none()) name = "null";
        if (key.boolean()) name = *key.boolean() ? "true" : "false";
        out += json_quoted(name);
        out += ": ";
        write_json(items[i].second, indent, level + 1, out);
      }
      if (!items.empty()) line_break(level);
      out += '}';
    } else if (value.is_none()) {
      out += "null";
    } else if (value.boolean()) {
      out += *value.boolean() ? "true" : "false";
    } else if (value.is_number()) {
      out += scalar_text(value);
    } else {
      fail(fmt::format("{} in tojson", value.type_name()));
    }
  }

  static inline const std::string kDot = ".";

  const std::string& name_;
  std::vector<std::shared_ptr<Scope>> scopes_;  // outermost first
  std::vector<std::shared_ptr<Macro>> macros_;  // all that were defined
  int depth_ = 0;
  int64_t steps_ = 0;
  int line_ = 1;
};

}  // namespace

bool is_function(std::string_view name) { return contains(kFunctions, name); }
bool is_method(std::string_view name) { return contains(kMethods, name); }
bool is_filter(std::string_view name) { return contains(kFilters, name); }
bool is_test(std::string_view name) { return contains(kTests, name); }

std::string render(const Block& block, std::vector<std::pair<std::string, Value>> variables,
                   const std::string& name) {
  return Evaluator(std::move(variables), name).run(block);
}

}  // namespace kvlm::jinja

#include "runtime/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"

namespace kvlm::jinja {

namespace {

void refuse_inside(const Value& item) {
  if (item.name_space() == nullptr && item.macro() == nullptr) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("a {} inside another value is not supported; write the template without it",
                  item.type_name()));
}

int checked_depth(int inner, const Value& item) {
  refuse_inside(item);
  const int depth = std::max(inner, item.depth() + 1);
  if (depth > kMaxValueDepth) {
    throw Error(ErrorCode::kUnsupported, "a value is nested too deeply; simplify the template");
  }
  return depth;
}

}  // namespace

bool Value::truthy() const {
  if (boolean()) return *boolean();
  if (integer()) return *integer() != 0;
  if (real()) return *real() != 0;
  if (text()) return !text()->empty();
  if (list()) return !list()->items.empty();
  if (dict()) return !dict()->items.empty();
  return name_space() != nullptr || loop() != nullptr || macro() != nullptr;
}

std::string_view Value::type_name() const {
  if (boolean()) return "bool";
  if (integer()) return "int";
  if (real()) return "float";
  if (text()) return "str";
  if (list()) return !list()->range.empty() ? "range" : list()->tuple ? "tuple" : "list";
  if (dict()) return "dict";
  if (name_space()) return "namespace";
  if (loop()) return "loop";
  if (macro()) return "macro";
  return is_undefined() ? "undefined" : "None";
}

int Value::depth() const {
  if (list()) return list()->depth;
  if (dict()) return dict()->depth;
  if (loop()) return loop()->items->depth + 1;
  return 0;
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items) {
    if (name.text() != nullptr && *name.text() == key) return &value;
  }
  return nullptr;
}

const Value* Namespace::find(std::string_view key) const {
  const auto found = items.find(key);
  return found == items.end() ? nullptr : &found->second;
}

void Namespace::set(std::string_view key, Value value) {
  refuse_inside(value);
  items.insert_or_assign(std::string(key), std::move(value));
}

Value Loop::attribute(std::string_view name) const {
  const auto number = [](size_t value) { return Value(static_cast<int64_t>(value)); };
  const size_t length = items->items.size();
  if (name == "index") return number(index + 1);
  if (name == "index0") return number(index);
  if (name == "revindex") return number(length - index);
  if (name == "revindex0") return number(length - index - 1);
  if (name == "first") return Value(index == 0);
  if (name == "last") return Value(index + 1 == length);
  if (name == "length") return number(length);
  if (name == "depth") return number(1);  // counts recursion, which is not built
  if (name == "depth0") return number(0);
  if (name == "previtem" && index > 0) return items->items[index - 1];
  if (name == "nextitem" && index + 1 < length) return items->items[index + 1];
  return Undefined{"loop." + std::string(name)};
}

Value make_list(std::vector<Value> items, bool tuple) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) list->depth = checked_depth(list->depth, item);
  list->items = std::move(items);
  list->tuple = tuple;
  return Value(std::shared_ptr<const List>(std::move(list)));
}

Value make_dict(std::vector<std::pair<Value, Value>> items) {
  auto dict = std::make_shared<Dict>();
  for (const auto& [key, value] : items) {
    dict->depth = checked_depth(checked_depth(dict->depth, key), value);
  }
  dict->items = std::move(items);
  return Value(std::shared_ptr<const Dict>(std::move(dict)));
}

}  // namespace kvlm::jinja

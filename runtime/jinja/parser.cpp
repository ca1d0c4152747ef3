#include "runtime/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <set>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/unicode.h"
#include "runtime/jinja/evaluator.h"
#include "runtime/jinja/lexer.h"

// A recursive descent parser of the Jinja2 that chat templates use: statements to blocks, then
// expressions by precedence, lowest first. Nesting is bounded, since the parser and the evaluator
// recurse over it.
namespace kvlm::jinja {

namespace {

/// Nesting of an expression and of blocks: the parser and the evaluator recurse over both.
constexpr int kMaxExprDepth = 128;
constexpr int kMaxBlockDepth = 32;

using ExprPtr = std::unique_ptr<Expr>;
using Kind = Expr::Kind;

/// Counts a level of recursion for as long as it lives.
class Level {
 public:
  explicit Level(int& level) : level_(level) { ++level_; }
  ~Level() { --level_; }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  int& level_;
};

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& name)
      : tokens_(std::move(tokens)), name_(name) {
    for (size_t i = 0; i + 2 < tokens_.size(); ++i) {
      const bool macro = tokens_[i].kind == Token::Kind::kBlockBegin &&
                         tokens_[i + 1].kind == Token::Kind::kName &&
                         tokens_[i + 1].text == "macro";
      if (macro) macros_.insert(tokens_[i + 2].text);
    }
  }

  Block run() {
    Block block = parse_block({});
    if (current().kind != Token::Kind::kEnd) fail_here("expected the end of the template");
    return block;
  }

 private:
  // --- tokens ------------------------------------------------------------------------------------

  const Token& current() const { return tokens_[pos_]; }
  const Token& ahead() const { return tokens_[std::min(pos_ + 1, tokens_.size() - 1)]; }
  void advance() {
    if (pos_ + 1 < tokens_.size()) ++pos_;
  }

  [[noreturn]] void fail(int line, const std::string& what) const {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} line {}: {}; repair the template or download it again", name_, line,
                            printable(what)));
  }
  [[noreturn]] void fail_here(const std::string& what) const {
    fail(current().line, fmt::format("{}, found \"{}\"", what, current().text));
  }
  [[noreturn]] void unsupported(int line, const std::string& what) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} line {}: {} is not supported by this template engine; write the "
                            "template without it",
                            name_, line, printable(what)));
  }

  bool is_operator(std::string_view text) const {
    return current().kind == Token::Kind::kOperator && current().text == text;
  }
  bool is_name(std::string_view text) const {
    return current().kind == Token::Kind::kName && current().text == text;
  }
  bool skip_operator(std::string_view text) {
    const bool found = is_operator(text);
    if (found) advance();
    return found;
  }
  bool skip_name(std::string_view text) {
    const bool found = is_name(text);
    if (found) advance();
    return found;
  }
  void expect_operator(std::string_view text) {
    if (!skip_operator(text)) fail_here(fmt::format("expected \"{}\"", text));
  }
  void expect_name(std::string_view text) {
    if (!skip_name(text)) fail_here(fmt::format("expected \"{}\"", text));
  }
  void expect_block_end() {
    if (current().kind != Token::Kind::kBlockEnd) fail_here("expected \"%}\"");
    advance();
  }
  std::string take_name() {
    if (current().kind != Token::Kind::kName) fail_here("expected a name");
    std::string text = current().text;
    advance();
    return text;
  }
  /// A name to assign to.
  std::string take_target() {
    const int line = current().line;
    std::string text = take_name();
    for (const char* word : {"true", "false", "none", "True", "False", "None", "and", "or", "not",
                             "in", "is", "if", "else"}) {
      if (text == word) fail(line, fmt::format("cannot assign to \"{}\"", text));
    }
    return text;
  }

  // --- statements --------------------------------------------------------------------------------

  /// Statements up to "{% word", where word is one of `ends`; stands on the word then.
  Block parse_block(std::initializer_list<std::string_view> ends) {
    const Level level(block_depth_);
    if (block_depth_ > kMaxBlockDepth) {
      unsupported(current().line, fmt::format("nesting blocks deeper than {}", kMaxBlockDepth));
    }
    Block block;
    for (;;) {
      const Token& token = current();
      if (token.kind == Token::Kind::kText) {
        auto statement = make(Statement::Kind::kText);
        statement->text = token.text;
        block.push_back(std::move(statement));
        advance();
      } else if (token.kind == Token::Kind::kPrintBegin) {
        auto statement = make(Statement::Kind::kOutput);
        advance();
        statement->expr = parse_tuple();
        if (current().kind != Token::Kind::kPrintEnd) fail_here("expected \"}}\"");
        advance();
        block.push_back(std::move(statement));
      } else if (token.kind == Token::Kind::kBlockBegin) {
        advance();
        const bool at_end = std::ranges::any_of(ends, [&](auto end) { return is_name(end); });
        if (at_end) return block;
        block.push_back(parse_statement());
      } else {
        if (ends.size() != 0) fail_here(fmt::format("expected \"{}\"", *(ends.end() - 1)));
        return block;
      }
    }
  }

  std::unique_ptr<Statement> make(Statement::Kind kind) const {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = current().line;
    return statement;
  }

  std::unique_ptr<Statement> parse_statement() {
    const int line = current().line;
    if (skip_name("if")) return parse_if();
    if (skip_name("for")) return parse_for();
    if (skip_name("set")) return parse_set();
    if (skip_name("macro")) return parse_macro();
    if (skip_name("generation")) {
      auto statement = make(Statement::Kind::kScope);
      expect_block_end();
      statement->body = parse_block({"endgeneration"});
      advance();
      expect_block_end();
      return statement;
    }
    for (const auto& [word, kind] : {std::pair{"break", Statement::Kind::kBreak},
                                     std::pair{"continue", Statement::Kind::kContinue}}) {
      if (!skip_name(word)) continue;
      if (loop_depth_ == 0) fail(line, fmt::format("{} outside a loop", word));
      auto statement = make(kind);
      expect_block_end();
      return statement;
    }
    for (const char* word : {"call", "filter", "with", "include", "import", "from", "extends",
                             "block", "do", "autoescape", "trans", "debug"}) {
      if (is_name(word)) unsupported(line, fmt::format("{{% {} %}}", word));
    }
    fail_here("expected a statement");
  }

  std::unique_ptr<Statement> parse_if() {
    auto statement = make(Statement::Kind::kIf);
    for (;;) {
      ExprPtr condition = parse_tuple();
      expect_block_end();
      Block body = parse_block({"elif", "else", "endif"});
      statement->branches.emplace_back(std::move(condition), std::move(body));
      if (skip_name("elif")) continue;
      if (skip_name("else")) {
        expect_block_end();
        statement->branches.emplace_back(nullptr, parse_block({"endif"}));
      }
      expect_name("endif");
      expect_block_end();
      return statement;
    }
  }

  std::unique_ptr<Statement> parse_for() {
    auto statement = make(Statement::Kind::kFor);
    const bool parenthesis = skip_operator("(");
    statement->names.push_back(take_target());
    while (skip_operator(",")) statement->names.push_back(take_target());
    if (parenthesis) expect_operator(")");
    expect_name("in");
    statement->expr = parse_tuple(/*with_condition=*/false);
    if (skip_name("if")) statement->condition = parse_expression();
    if (is_name("recursive")) unsupported(current().line, "a recursive loop");
    expect_block_end();
    ++loop_depth_;
    statement->body = parse_block({"else", "endfor"});
    --loop_depth_;
    if (skip_name("else")) {
      expect_block_end();
      statement->otherwise = parse_block({"endfor"});
    }
    expect_name("endfor");
    expect_block_end();
    return statement;
  }

  std::unique_ptr<Statement> parse_set() {
    auto statement = make(Statement::Kind::kSet);
    statement->names.push_back(take_target());
    if (skip_operator(".")) {
      statement->attribute = take_name();
    } else {
      while (skip_operator(",")) statement->names.push_back(take_target());
    }
    if (skip_operator("=")) {
      statement->expr = parse_tuple();
      expect_block_end();
      return statement;
    }
    if (is_operator("|")) unsupported(current().line, "a filter on a set block");
    if (statement->names.size() != 1 || !statement->attribute.empty()) {
      fail_here("expected \"=\"");
    }
    statement->kind = Statement::Kind::kSetBlock;
    expect_block_end();
    statement->body = parse_block({"endset"});
    advance();
    expect_block_end();
    return statement;
  }

  std::unique_ptr<Statement> parse_macro() {
    auto statement = make(Statement::Kind::kMacro);
    statement->text = take_target();
    expect_operator("(");
    std::set<std::string> names;
    for (bool first = true; !skip_operator(")"); first = false) {
      if (!first) expect_operator(",");
      const int line = current().line;
      statement->names.push_back(take_target());
      const std::string& name = statement->names.back();
      if (!names.insert(name).second) {
        fail(line, fmt::format("the macro {} has two arguments {}", statement->text, name));
      }
      if (skip_operator("=")) {
        statement->defaults.push_back(parse_expression());
      } else if (!statement->defaults.empty()) {
        fail(line, fmt::format("the macro {} has an argument {} without a default after one with",
                               statement->text, name));
      }
    }
    expect_block_end();
    const int outer_loops = std::exchange(loop_depth_, 0);
    std::vector<std::string> outer_arguments = std::exchange(macro_arguments_, statement->names);
    ++macro_depth_;
    statement->body = parse_block({"endmacro"});
    --macro_depth_;
    macro_arguments_ = std::move(outer_arguments);
    loop_depth_ = outer_loops;
    advance();
    expect_block_end();
    return statement;
  }

  // --- expressions, loosest first ----------------------------------------------------------------

  ExprPtr node(Kind kind, int line, std::vector<ExprPtr> args, std::string text = "") const {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = line;
    expr->text = std::move(text);
    expr->args = std::move(args);
    for (const ExprPtr& arg : expr->args) deepen(*expr, arg.get());
    return expr;
  }
  void deepen(Expr& expr, const Expr* inner) const {
    if (inner == nullptr) return;
    expr.depth = std::max(expr.depth, inner->depth + 1);
    if (expr.depth > kMaxExprDepth) too_deep(expr.line);
  }
  [[noreturn]] void too_deep(int line) const {
    unsupported(line, fmt::format("an expression of more than {} levels", kMaxExprDepth));
  }
  template <class... Args>
  static std::vector<ExprPtr> list_of(Args... args) {
    std::vector<ExprPtr> list;
    (list.push_back(std::move(args)), ...);
    return list;
  }

  /// What stands where a comma makes a tuple.
  ExprPtr parse_tuple(bool with_condition = true) {
    const int line = current().line;
    const auto element = [&] { return with_condition ? parse_expression() : parse_or(); };
    ExprPtr first = element();
    if (!is_operator(",")) return first;
    std::vector<ExprPtr> items = list_of(std::move(first));
    while (skip_operator(",")) {
      if (current().kind == Token::Kind::kBlockEnd || current().kind == Token::Kind::kPrintEnd ||
          is_operator(")")) {
        break;
      }
      items.push_back(element());
    }
    return node(Kind::kTuple, line, std::move(items));
  }

  ExprPtr parse_expression() {
    const Level level(expr_depth_);
    if (expr_depth_ > kMaxExprDepth) too_deep(current().line);
    ExprPtr expr = parse_or();
    while (is_name("if")) {
      const int line = current().line;
      advance();
      ExprPtr condition = parse_or();
      ExprPtr otherwise = skip_name("else") ? parse_expression() : nullptr;
      expr = node(Kind::kCondition, line,
                  list_of(std::move(condition), std::move(expr), std::move(otherwise)));
    }
    return expr;
  }

  ExprPtr parse_or() {
    ExprPtr left = parse_and();
    while (is_name("or")) {
      const int line = current().line;
      advance();
      left = node(Kind::kOr, line, list_of(std::move(left), parse_and()));
    }
    return left;
  }

  ExprPtr parse_and() {
    ExprPtr left = parse_not();
    while (is_name("and")) {
      const int line = current().line;
      advance();
      left = node(Kind::kAnd, line, list_of(std::move(left), parse_not()));
    }
    return left;
  }

  ExprPtr parse_not() {
    if (!is_name("not")) return parse_compare();
    const Level level(expr_depth_);
    const int line = current().line;
    if (expr_depth_ > kMaxExprDepth) too_deep(line);
    advance();
    return node(Kind::kNot, line, list_of(parse_not()));
  }

  ExprPtr parse_compare() {
    const int line = current().line;
    std::vector<ExprPtr> args = list_of(parse_sum());
    std::vector<std::string> ops;
    for (;;) {
      std::string op;
      if (current().kind == Token::Kind::kOperator) {
        for (const char* text : {"==", "!=", "<", "<=", ">", ">="}) {
          if (is_operator(text)) op = text;
        }
      } else if (is_name("in")) {
        op = "in";
      } else if (is_name("not") && ahead().kind == Token::Kind::kName && ahead().text == "in") {
        op = "not in";
        advance();
      }
      if (op.empty()) break;
      advance();
      ops.push_back(op);
      args.push_back(parse_sum());
    }
    if (ops.empty()) return std::move(args.front());
    ExprPtr expr = node(Kind::kCompare, line, std::move(args));
    expr->ops = std::move(ops);
    return expr;
  }

  /// A left-associative level of binary operators.
  template <class Operand>
  ExprPtr parse_binary(std::initializer_list<std::string_view> ops, Operand&& operand) {
    ExprPtr left = operand();
    for (;;) {
      const auto op = std::ranges::find_if(ops, [&](auto text) { return is_operator(text); });
      if (op == ops.end()) return left;
      const int line = current().line;
      advance();
      left = node(Kind::kBinary, line, list_of(std::move(left), operand()), std::string(*op));
    }
  }
  ExprPtr parse_sum() {
    return parse_binary({"+", "-"}, [this] { return parse_concatenation(); });
  }
  ExprPtr parse_concatenation() {
    return parse_binary({"~"}, [this] { return parse_product(); });
  }
  ExprPtr parse_product() {
    return parse_binary({"*", "/", "//", "%"}, [this] { return parse_unary(true); });
  }

  ExprPtr parse_unary(bool with_filters) {
    const Level level(expr_depth_);
    const int line = current().line;
    if (expr_depth_ > kMaxExprDepth) too_deep(line);
    ExprPtr expr;
    if (skip_operator("-")) {
      expr = node(Kind::kNegate, line, list_of(parse_unary(false)));
    } else if (skip_operator("+")) {
      expr = node(Kind::kPlus, line, list_of(parse_unary(false)));
    } else {
      expr = parse_postfix(parse_primary());
    }
    if (with_filters) expr = parse_filters(std::move(expr));
    if (is_operator("**")) unsupported(current().line, "**");
    return expr;
  }

  ExprPtr constant(Value value) {
    ExprPtr expr = node(Kind::kConst, current().line, {});
    expr->value = std::move(value);
    advance();
    return expr;
  }

  ExprPtr parse_primary() {
    const Token& token = current();
    const int line = token.line;
    switch (token.kind) {
      case Token::Kind::kString: {
        std::string text;
        while (current().kind == Token::Kind::kString) {
          text += current().text;
          advance();
        }
        ExprPtr expr = node(Kind::kConst, line, {});
        expr->value = Value(std::move(text));
        return expr;
      }
      case Token::Kind::kInteger: {
        int64_t value = 0;
        const char* end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ec != std::errc()) {
          unsupported(line, "the number " + token.text);
        }
        return constant(Value(value));
      }
      case Token::Kind::kReal: {
        double value = 0;
        const char* end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ec != std::errc()) {
          unsupported(line, "the number " + token.text);
        }
        return constant(Value(value));
      }
      case Token::Kind::kName: {
        if (is_name("true") || is_name("True")) return constant(Value(true));
        if (is_name("false") || is_name("False")) return constant(Value(false));
        if (is_name("none") || is_name("None")) return constant(Value());
        for (const char* word : {"and", "or", "not", "in", "is", "if", "else"}) {
          if (is_name(word)) fail_here("expected an expression");
        }
        for (const char* word : {"varargs", "kwargs", "caller"}) {
          if (macro_depth_ > 0 && is_name(word) &&
              std::ranges::find(macro_arguments_, word) == macro_arguments_.end()) {
            unsupported(line, fmt::format("the name {} in a macro", word));
          }
        }
        return node(Kind::kName, line, {}, take_name());
      }
      case Token::Kind::kOperator:
        break;
      default:
        fail_here("expected an expression");
    }
    if (skip_operator("(")) {
      if (skip_operator(")")) return node(Kind::kTuple, line, {});
      ExprPtr expr = parse_tuple();
      expect_operator(")");
      return expr;
    }
    if (skip_operator("[")) {
      std::vector<ExprPtr> items;
      while (!skip_operator("]")) {
        if (!items.empty()) expect_operator(",");
        if (skip_operator("]")) break;
        items.push_back(parse_expression());
      }
      return node(Kind::kList, line, std::move(items));
    }
    if (skip_operator("{")) {
      std::vector<ExprPtr> items;
      while (!skip_operator("}")) {
        if (!items.empty()) expect_operator(",");
        if (skip_operator("}")) break;
        items.push_back(parse_expression());
        expect_operator(":");
        items.push_back(parse_expression());
      }
      return node(Kind::kDict, line, std::move(items));
    }
    fail_here("expected an expression");
  }

  ExprPtr parse_postfix(ExprPtr expr) {
    for (;;) {
      const int line = current().line;
      if (skip_operator(".")) {
        if (current().kind == Token::Kind::kInteger) {
          ExprPtr index = parse_primary();
          expr = node(Kind::kIndex, line, list_of(std::move(expr), std::move(index)));
        } else {
          expr = node(Kind::kAttr, line, list_of(std::move(expr)), take_name());
        }
      } else if (skip_operator("[")) {
        expr = parse_subscript(std::move(expr), line);
      } else if (is_operator("(")) {
        expr = parse_call(std::move(expr), line);
      } else {
        return expr;
      }
    }
  }

  ExprPtr parse_subscript(ExprPtr object, int line) {
    std::vector<ExprPtr> args = list_of(std::move(object));
    bool slice = false;
    for (int part = 0; part < 3; ++part) {
      const bool empty = is_operator(":") || is_operator("]");
      args.push_back(empty ? nullptr : parse_expression());
      if (!skip_operator(":")) break;
      slice = true;
    }
    if (is_operator(",")) unsupported(line, "a subscript with a comma");
    expect_operator("]");
    if (!slice) {
      if (args.back() == nullptr) fail(line, "an empty subscript");
      return node(Kind::kIndex, line, std::move(args));
    }
    args.resize(4);
    return node(Kind::kSlice, line, std::move(args));
  }

  ExprPtr parse_call(ExprPtr callee, int line) {
    ExprPtr call;
    if (callee->kind == Kind::kAttr) {
      if (!is_method(callee->text)) unsupported(line, fmt::format(".{}()", callee->text));
      call = node(Kind::kMethod, line, std::move(callee->args), callee->text);
    } else if (callee->kind == Kind::kName) {
      if (!is_function(callee->text) && !macros_.contains(callee->text))
        unsupported(line, fmt::format("{}()", callee->text));
      call = node(Kind::kCall, line, {}, callee->text);
    } else {
      unsupported(line, "calling a value");
    }
    parse_arguments(*call);
    return call;
  }

  void parse_arguments(Expr& call) {
    expect_operator("(");
    std::set<std::string> names;
    for (bool first = true; !skip_operator(")"); first = false) {
      if (!first) expect_operator(",");
      if (skip_operator(")")) return;
      if (is_operator("*") || is_operator("**")) {
        unsupported(call.line, "an argument list spread with *");
      }
      const bool named = current().kind == Token::Kind::kName &&
                         ahead().kind == Token::Kind::kOperator && ahead().text == "=";
      std::string name;
      if (named) {
        name = take_name();
        if (!names.insert(name).second) {
          fail(call.line, fmt::format("the argument {} is there twice", name));
        }
        advance();
      } else if (!call.named.empty()) {
        fail_here("expected a named argument");
      }
      ExprPtr value = parse_expression();
      deepen(call, value.get());
      if (named) {
        call.named.emplace_back(std::move(name), std::move(value));
      } else {
        call.args.push_back(std::move(value));
      }
    }
  }

  ExprPtr parse_filters(ExprPtr expr) {
    for (;;) {
      const int line = current().line;
      if (skip_operator("|")) {
        std::string name = take_name();
        if (!is_filter(name)) unsupported(line, fmt::format("the filter {}", name));
        expr = node(Kind::kFilter, line, list_of(std::move(expr)), std::move(name));
        if (is_operator("(")) parse_arguments(*expr);
      } else if (skip_name("is")) {
        expr = parse_test(std::move(expr), line);
      } else if (is_operator("(")) {
        unsupported(line, "calling a value");
      } else {
        return expr;
      }
    }
  }

  ExprPtr parse_test(ExprPtr subject, int line) {
    const bool negated = skip_name("not");
    std::string name = take_name();
    if (!is_test(name)) unsupported(line, fmt::format("the test {}", name));
    ExprPtr expr = node(Kind::kTest, line, list_of(std::move(subject)), std::move(name));
    if (is_operator("(")) {
      parse_arguments(*expr);
      if (!expr->named.empty()) unsupported(line, "a named argument of a test");
    } else if (starts_test_argument()) {
      ExprPtr argument = parse_postfix(parse_primary());
      deepen(*expr, argument.get());
      expr->args.push_back(std::move(argument));
    }
    return negated ? node(Kind::kNot, line, list_of(std::move(expr))) : std::move(expr);
  }

  bool starts_test_argument() const {
    const Token& token = current();
    switch (token.kind) {
      case Token::Kind::kName:
        for (const char* word : {"else", "or", "and", "if", "is", "in", "not"}) {
          if (token.text == word) return false;
        }
        return true;
      case Token::Kind::kString:
      case Token::Kind::kInteger:
      case Token::Kind::kReal:
        return true;
      case Token::Kind::kOperator:
        return token.text == "[" || token.text == "{";
      default:
        return false;
    }
  }

  std::vector<Token> tokens_;
  const std::string& name_;
  std::set<std::string> macros_;  // whose definitions are somewhere in the template
  std::vector<std::string> macro_arguments_;
  int macro_depth_ = 0;
  size_t pos_ = 0;
  int block_depth_ = 0;
  int expr_depth_ = 0;
  int loop_depth_ = 0;
};

}  // namespace

Block parse(std::string_view source, const std::string& name) {
  return Parser(tokenize(source, name), name).run();
}

}  // namespace kvlm::jinja

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/jinja/value.h"

namespace kvlm::jinja {

/// An expression. Which of the fields mean something depends on `kind`; see the comments there.
struct Expr {
  enum class Kind : unsigned char {
    kConst,     // value
    kName,      // text
    kList,      // args
    kTuple,     // args
    kDict,      // args: key, value, key, value ...
    kAttr,      // args[0] . text
    kIndex,     // args[0] [ args[1] ]
    kSlice,     // args[0] [ args[1] : args[2] : args[3] ], any of the three null
    kCall,      // text ( args, named ): a macro or a global function
    kMethod,    // args[0] . text ( args[1...], named )
    kFilter,    // args[0] | text ( args[1...], named )
    kTest,      // args[0] is text ( args[1...] )
    kNot,       // args[0]
    kNegate,    // args[0]
    kPlus,      // args[0]
    kAnd,       // args[0], args[1]
    kOr,        // args[0], args[1]
    kBinary,    // args[0] text args[1], text one of + - * / // % ~
    kCompare,   // args[0] ops[0] args[1] ops[1] args[2] ...
    kCondition  // args[1] if args[0] else args[2], which may be null
  } kind = Kind::kConst;
  int line = 0;
  int depth = 1;  // of the tree below
  std::string text;
  Value value;
  std::vector<std::unique_ptr<Expr>> args;
  std::vector<std::pair<std::string, std::unique_ptr<Expr>>> named;
  std::vector<std::string> ops;
};

struct Statement;
using Block = std::vector<std::unique_ptr<Statement>>;

struct Statement {
  enum class Kind : unsigned char {
    kText,      // text
    kOutput,    // expr
    kIf,        // branches; the last one has no condition if there is an else
    kFor,       // names in expr if condition: body, otherwise
    kSet,       // names = expr; with one dotted name, an attribute of a namespace
    kSetBlock,  // names[0] = what body prints
    kScope,     // body, whose assignments stay inside: generation
    kMacro,     // text ( names, of which the last have defaults ): body
    kBreak,
    kContinue
  } kind = Kind::kText;
  int line = 0;
  std::string text;
  std::string attribute;  // kSet: names[0].attribute
  std::vector<std::string> names;
  std::unique_ptr<Expr> expr;
  std::unique_ptr<Expr> condition;
  std::vector<std::unique_ptr<Expr>> defaults;
  Block body;
  Block otherwise;
  std::vector<std::pair<std::unique_ptr<Expr>, Block>> branches;
};

}  // namespace kvlm::jinja

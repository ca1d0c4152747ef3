#include "llm/tokenizer.h"

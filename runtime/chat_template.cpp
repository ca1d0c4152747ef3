#include "runtime/chat_template.h"

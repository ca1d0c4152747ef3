#include "runtime/model_path.h"

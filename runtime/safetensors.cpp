#include "runtime/safetensors.h"

#include "vision/preprocess.h"

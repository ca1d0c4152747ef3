#include "vision/image.h"

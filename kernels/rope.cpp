#include "kernels/rope.h"

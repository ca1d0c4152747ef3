#include "kernels/activation.h"

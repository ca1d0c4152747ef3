#include "kernels/attention.h"

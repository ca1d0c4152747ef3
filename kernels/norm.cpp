#include "kernels/norm.h"

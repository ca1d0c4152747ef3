#pragma once

// What another project includes to bring a cache policy of its own: register_retention(), the
// interface Retention, and the bases, options and scores of the rules that are built in.
// examples/custom_policy is one.
#include "kernels/base/error.h"
#include "kernels/row_scores.h"
#include "kvcache/retention.h"
#include "kvcache/retention/scored.h"
#include "kvcache/spec/registry.h"

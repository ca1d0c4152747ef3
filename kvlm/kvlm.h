#pragma once

// What another project includes, linked by kvlm::kvlm: Captioner, the shortest way from a
// checkpoint and an image or video to text, and what it is made of, for those who need more:
// Generator for batches and turns over a cache that they plan and make. kvlm/policy.h is for those
// who bring a cache policy of their own.
#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "runtime/captioner.h"
#include "runtime/clip_file.h"
#include "runtime/generator.h"
#include "runtime/loading/model_path.h"
#include "runtime/prompt.h"
#include "runtime/spec_file.h"
#include "vision/image.h"

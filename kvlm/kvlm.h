#pragma once

// What another project includes, linked by kvlm::kvlm: Captioner, the shortest way from a
// checkpoint and a picture or video to words, and what it is made of, for those who need more.
#include "kernels/base/error.h"
#include "runtime/captioner.h"
#include "runtime/clip_file.h"
#include "runtime/generator.h"
#include "runtime/loading/model_path.h"
#include "vision/image.h"
